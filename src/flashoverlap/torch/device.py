"""The transport for accelerators (NCCL and other device backends): rounds of ``batch_isend_irecv``. Unproven so far.

Nothing here names a vendor. Agreement goes over a gloo group of the same ranks, so that it costs no synchronisation of
the device; data goes over a group of our own, in grouped rounds, in the order in which the program posts them. Waiting
for a ticket makes the current stream wait, not the program, so ``blocked`` time is not seen from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .gloo import Gloo
from .transport import DONE


class _Round:
    """The ticket of one half of a round."""

    name = "round"
    posted_s = done_s = 0.0

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = list(works)

    def wait(self) -> float:
        """Orders the current stream behind the transfer."""
        for work in self._works:
            work.wait()
        self._works = []
        return 0.0


class Device(Gloo):
    """Pieces of device tensors between the ranks of a registered process group.

    The agreement, staging and failure handling are those of :class:`~flashoverlap.torch.gloo.Gloo`.
    """

    def __init__(self, group: Any, device: torch.device | None = None) -> None:
        if device is None:
            accelerator = torch.accelerator.current_accelerator()
            device = torch.device("cpu") if accelerator is None else accelerator
        super().__init__(group, device)
        ranks = dist.get_process_group_ranks(group)
        self._peers = ranks
        self._data: Any = dist.new_group(ranks, use_local_synchronization=True, backend=dist.get_backend(group))

    def post(self, send: torch.Tensor, to: int, recv: torch.Tensor, frm: int, after: Any = None) -> tuple[Any, Any]:
        """Posts one grouped round; see :class:`~flashoverlap.torch.transport.Transport`."""
        if isinstance(after, _Round):
            after.wait()
        halves = []
        if send.numel():
            halves.append(dist.P2POp(dist.isend, send, self._peers[to], self._data))
        if recv.numel():
            halves.append(dist.P2POp(dist.irecv, recv, self._peers[frm], self._data))
        if not halves:
            return DONE, DONE
        ticket = _Round(dist.batch_isend_irecv(halves))
        return ticket, ticket

    def collective(self, kind: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Any:
        """Runs one of the backend's collectives, which take pieces of unequal size as lists."""
        if kind == "all_gather":
            work = dist.all_gather(list(writes), reads[0], group=self._data, async_op=True)
        elif kind == "reduce_scatter":
            work = dist.reduce_scatter(writes[0], list(reads), group=self._data, async_op=True)
        elif kind == "all_to_all":
            work = dist.all_to_all(list(writes), list(reads), group=self._data, async_op=True)
        else:
            for read, write in zip(reads, writes, strict=True):
                write.copy_(read)
            works = [dist.all_reduce(write, group=self._data, async_op=True) for write in writes]
            return _Round(works)
        return _Round([work])
