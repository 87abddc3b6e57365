"""Private gloo groups of the same ranks as a given group, made over nothing but that group itself.

[Note: who is missing] A collective does not tell whom it waits for, and one that is given up leaves a thread of the
group waiting, which holds the interpreter up when it is to end. So the addresses go from each rank to each as messages
with a tag of their own, the only ones that are ever sent on a gloo group of the user's.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from .errors import PeerError, reason

_TAG = int.from_bytes(b"FlOv", "big")  # a number that nobody else is likely to take


def gloo_backend(group: Any) -> Any | None:
    """The gloo backend of a process group, or None where it has none for CPU tensors."""
    if isinstance(group, dist.ProcessGroupGloo):
        return group
    try:
        backend = group._get_backend(torch.device("cpu"))
    except (AttributeError, RuntimeError):
        return None
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a checker around it
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


def members(group: Any) -> tuple[int, ...]:
    """The group's ranks among all of the job; none for a group that torch has not registered."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return ()


def private_groups(group: Any, device: torch.device, names: tuple[str, ...]) -> list[Any]:
    """Makes one gloo group for each name; collective over ``group``, whose time-out and network devices they take.

    Args:
        group: any process group.
        device: where tensors of the group's collectives must be, if it is no gloo group.
        names: what tells the groups apart.

    Raises:
        PeerError: a rank is gone or did not call within the time-out.
    """
    backend = gloo_backend(group)
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    if backend is None:
        options._timeout = timedelta(minutes=30)
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
    else:
        options._timeout = backend.options._timeout
        options._devices = backend.options._devices
    store = GroupStore(group, backend, device)
    try:
        return [dist.ProcessGroupGloo(PrefixStore(name, store), group.rank(), group.size(), options) for name in names]
    except PeerError:
        raise
    except RuntimeError as error:  # a rank has died since its addresses were shared: a second look says which
        store.share()
        raise PeerError(f"no connection could be made to a rank of the group ({reason(error)})") from error
    finally:
        store.close()


class GroupStore(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """A key-value store made of messages of a group itself: what new groups of the same ranks are built over."""

    def __init__(self, group: Any, backend: Any | None, device: torch.device) -> None:
        super().__init__()
        self._group, self._backend, self._device = group, backend, device
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Keeps a value until some rank asks."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The value of ``key``; where it is another rank's, all ranks share what they have."""
        if key not in self._values:
            self.share()
        return self._values[key]

    def wait(self, keys: list[str], timeout: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns when all keys are there."""
        for key in keys:
            self.get(key)

    def share(self) -> None:
        """Gives every rank what any of them has; collective."""
        mine = torch.frombuffer(bytearray(pickle.dumps(self._values)), dtype=torch.uint8)
        lengths = self._all_gather(torch.tensor([mine.numel()]))
        padded = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        for length, theirs in zip(lengths, self._all_gather(padded), strict=True):
            self._values.update(pickle.loads(theirs[: int(length)].numpy().tobytes()))

    def close(self) -> None:
        """Lets go of the group, which the groups made over this store would otherwise keep alive."""
        self._group = self._backend = None

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        group: Any = self._group
        if self._backend is not None:
            return _exchange(self._backend, tensor)
        tensor = tensor.to(self._device)
        gathered = [torch.empty_like(tensor) for _ in range(group.size())]
        group.allgather([gathered], [tensor]).wait()
        return [part.cpu() for part in gathered]


def _exchange(backend: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    """All ranks' tensors, sent from each to each ([Note: who is missing])."""
    gathered = [torch.empty_like(tensor) for _ in range(backend.size())]
    gathered[backend.rank()] = tensor
    works, failed = [], None
    for peer in range(backend.size()):
        if peer != backend.rank():
            try:
                works.append((peer, backend.recv([gathered[peer]], peer, _TAG)))
                works.append((peer, backend.send([tensor], peer, _TAG)))
            except RuntimeError as error:
                failed = failed or (peer, error)  # the others are still to hear from this rank
    for peer, work in works if failed is None else []:
        try:
            work.wait()
        except RuntimeError as error:
            failed = peer, error
            break
    if failed is not None:
        peer, error = failed
        raise PeerError(f"rank {peer} of the group is gone or did not call in time ({reason(error)})") from error
    return gathered
