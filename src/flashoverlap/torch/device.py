"""The transport for accelerators (NCCL and other device backends): rounds of ``batch_isend_irecv``. Unproven so far.

Nothing here names a vendor. Agreement goes over a gloo group of the same ranks, so that it costs no synchronisation of
the device; data goes over a group of our own, in grouped rounds, in the order in which the program posts them. Waiting
for a ticket makes the current stream wait, not the program, so ``blocked`` time is not seen from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .collectives import COLLECTIVES
from .errors import PeerError, reason
from .gloo import Gloo
from .transport import DONE


class _Round:
    """The ticket of a round, of both its halves, or of a collective."""

    posted_s = done_s = 0.0

    def __init__(self, name: str, works: Sequence[Any], finish: Callable[[], None] | None = None) -> None:
        self.name, self._works, self._finish = name, list(works), finish

    @property
    def arrived(self) -> bool:
        """Whether the backend is through with it."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> float:
        """Orders the current stream behind the transfer."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise PeerError(f"{self.name} failed ({reason(error)})") from error
        if self._finish is not None:
            self._finish()
        self._works, self._finish = [], None
        return 0.0


class Device(Gloo):
    """Pieces of device tensors between the ranks of a registered process group.

    The agreement, staging and failure handling are those of :class:`~flashoverlap.torch.gloo.Gloo`. The group of our
    own is registered like every group of torch, so it lasts until ``dist.destroy_process_group()``.

    What the tests prove: with CPU tensors and a gloo backend below, all patterns and modes give the right values, so
    the order of rounds, global and group ranks, uneven and empty pieces, hand-on and collectives are right. What they
    do not prove, since a CPU has no streams: that work is ordered between streams, that buffers outlive what is queued
    on them, that a grouped round cannot deadlock on NCCL, that anything overlaps, and how a dead peer shows while data
    moves.
    """

    def __init__(self, group: Any, device: torch.device | None = None) -> None:
        if device is None:
            accelerator = torch.accelerator.current_accelerator()
            device = torch.device("cpu") if accelerator is None else accelerator
        super().__init__(group, device)
        self._global = dist.get_process_group_ranks(group)
        self._data: Any = dist.new_group(self._global, use_local_synchronization=True, backend=dist.get_backend(group))

    def expect(self, recv: torch.Tensor, frm: int) -> Any | None:
        """Nothing yet: a grouped round is posted as a whole."""
        return None

    def post(
        self, send: torch.Tensor, to: int, recv: torch.Tensor, frm: int, after: Any = None, expected: Any = None
    ) -> tuple[Any, Any]:
        """Posts one grouped round; see :class:`~flashoverlap.torch.transport.Transport`."""
        if isinstance(after, _Round):
            after.wait()
        halves = []
        if send.numel():
            halves.append(dist.P2POp(dist.isend, send, self._global[to], self._data))
        if recv.numel():
            halves.append(dist.P2POp(dist.irecv, recv, self._global[frm], self._data))
        if not halves:
            return DONE, DONE
        name = f"the exchange to rank {to} from rank {frm}"
        try:
            ticket = _Round(name, dist.batch_isend_irecv(halves))
        except RuntimeError as error:
            raise PeerError(f"{name} could not start ({reason(error)})") from error
        return ticket, ticket

    def collective(self, kind: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Any:
        """Runs one of the backend's collectives; see :class:`~flashoverlap.torch.transport.Transport`."""
        try:
            work, finish = COLLECTIVES[kind](self._data, self.rank, reads, writes)
        except RuntimeError as error:
            raise PeerError(f"{kind} could not start ({reason(error)})") from error
        return _Round(kind, [work], finish)
