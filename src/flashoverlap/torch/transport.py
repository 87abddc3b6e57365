"""Moving pieces between the ranks of a group: what a backend has to offer, and how a group's transport is found.

To add a backend: one class with the methods of :class:`Transport`, and a line in :func:`transport_of`.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend  # pyright: ignore[reportMissingModuleSource]
from torch.distributed.device_mesh import DeviceMesh

from ..machine import Machine
from ..patterns import split_sizes
from ..trace import Span
from .errors import PeerError, naming
from .planned import Planned
from .staging import Staging


class Ticket(Protocol):
    """One transfer under way."""

    name: str
    posted_s: float
    done_s: float

    @property
    def arrived(self) -> bool:
        """Whether a wait would return at once."""
        ...

    def wait(self) -> float:
        """Returns once the bytes have moved: the seconds that this took. Raises PeerError."""
        ...


class Transport(Protocol):
    """What the executor asks of a backend: calls come one at a time, in the same order on every rank."""

    rank: int
    world_size: int
    members: tuple[int, ...]
    """The ranks among all of the job, where torch knows them."""
    staging: Staging
    calls: int
    """Agreements and refusals so far, as many on every rank."""
    spans: list[Span] | None
    """Where set, what every call did when is appended here."""
    machine: Machine | None
    """What calls are planned with, the same on every rank (:class:`~flashoverlap.torch.planned.Planned`)."""

    def exchange_cards(self, card: bytes) -> list[bytes]:
        """Every rank's card, by rank; blocks until all have called. Cards have :data:`CARD_BYTES` bytes."""
        ...

    def refuse(self, card: bytes) -> None:
        """Leaves a card for the peers of this call without waiting for theirs."""
        ...

    def expect(self, recv: torch.Tensor, frm: int) -> Ticket | None:
        """Gets ready for a receive that is posted later; its ticket, or None where both halves go together."""
        ...

    def post(
        self, send: torch.Tensor, to: int, recv: torch.Tensor, frm: int, after: Any = None, expected: Any = None
    ) -> tuple[Ticket, Ticket]:
        """Posts one exchange of contiguous tensors and returns the tickets of its two halves.

        Sends leave one after another in the order of posting; ``after`` is the ticket of the receive that fills
        ``send``, where it is to be handed on; ``expected`` what :meth:`expect` gave for ``recv``. Empty tensors move
        nothing.
        """
        ...

    def collective(self, kind: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Ticket:
        """Starts one of the backend's own collectives on contiguous tensors and returns its ticket."""
        ...

    def fail(self, error: BaseException) -> None:
        """Gives the transport up after an error in the middle of a call; the peers are told."""
        ...


class Done:
    """The ticket of a transfer that needed none."""

    name = ""
    posted_s = done_s = 0.0
    arrived = True

    def wait(self) -> float:
        """Nothing to wait for."""
        return 0.0


DONE = Done()


class Silent(Planned):
    """A transport that moves nothing: a group of one rank, or the measure of what computation alone costs."""

    measures = False
    members = ()

    def __init__(self, rank: int = 0, world_size: int = 1, rows: int | None = None) -> None:
        """``rows`` are those of all ranks together, where their shards may be unequal."""
        self.rank, self.world_size, self._rows = rank, world_size, rows
        self.staging = Staging()
        self.calls = 0
        self.spans: list[Span] | None = None
        self.failed = False
        self.busy = threading.Lock()

    def exchange_cards(self, card: bytes) -> list[bytes]:
        """The own card, as if all ranks agreed, with the rows of equal shards, or of those that are known."""
        ok, digest, own, more = _CARD.unpack_from(card)
        sizes = [own] * self.world_size
        if self._rows is not None and own == split_sizes(self._rows, self.world_size)[self.rank]:
            sizes = split_sizes(self._rows, self.world_size)
        if not ok:
            return [card] * self.world_size
        return [_CARD.pack(ok, digest, size, more) + card[_CARD.size :] for size in sizes]

    def refuse(self, card: bytes) -> None:
        """There is nobody to tell."""

    def expect(self, recv: torch.Tensor, frm: int) -> Any | None:
        """Nothing will come."""
        return DONE

    def post(
        self, send: torch.Tensor, to: int, recv: torch.Tensor, frm: int, after: Any = None, expected: Any = None
    ) -> tuple[Any, Any]:
        """Moves nothing."""
        return DONE, DONE

    def collective(self, kind: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Any:
        """Moves nothing between ranks; with one rank, input and output are the same."""
        for read, write in zip(reads, writes, strict=False):
            if self.world_size == 1 and read.data_ptr() != write.data_ptr():
                write.copy_(read)
        return DONE

    def fail(self, error: BaseException) -> None:
        """Nothing is in flight that could be lost."""


# --- agreement --------------------------------------------------------------------------------------------------------

CARD_BYTES = 1024
_CARD = struct.Struct("<?16sqq")
_TEXT_BYTES = CARD_BYTES - _CARD.size


@lru_cache(maxsize=1024)
def _digest(shared: str) -> bytes:
    return hashlib.blake2b(shared.encode(), digest_size=16).digest()


def agree(transport: Transport, shared: str, shown: str, rows: int = 0) -> list[int]:
    """Makes sure that all ranks are in the same call, before any data moves.

    Args:
        shared: what must be equal on every rank.
        shown: what an error message is to say of this rank's arguments.
        rows: a number of this rank's own, given to all.

    Returns:
        ``rows`` of every rank.

    Raises:
        ValueError: on every rank, where ``shared`` differs between ranks; with what each of them said.
        PeerError: a peer has refused its arguments, died or did not call within the time-out.
    """
    return [count for count, _ in agree_twice(transport, shared, shown, rows)]


def agree_twice(transport: Transport, shared: str, shown: str, rows: int, more: int = 0) -> list[tuple[int, int]]:
    """:func:`agree` with two numbers of each rank's own."""
    text = shown.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    cards = transport.exchange_cards(_CARD.pack(True, _digest(shared), rows, more) + text)
    said = [_CARD.unpack_from(card) for card in cards]
    if all(ok and digest == said[0][1] for ok, digest, _, _ in said):
        return [(count, other) for _, _, count, other in said]
    texts = [card[_CARD.size :].rstrip(b"\0").decode(errors="replace") for card in cards]
    refusals = [f"rank {rank}: {text}" for rank, (text, (ok, *_)) in enumerate(zip(texts, said, strict=True)) if not ok]
    if refusals:
        raise PeerError("the call was refused by " + "; ".join(refusals) + "; nothing was sent")
    told = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
    raise ValueError(f"the ranks of the group disagree about this call; nothing was sent\n{told}")


@contextmanager
def refusing(transport: Transport) -> Iterator[None]:
    """Tells the peers of a call that this rank's arguments are bad, so that they raise as well and do not wait."""
    try:
        yield
    except Exception as error:  # an activation of the caller's, tried out, may raise anything
        text = (str(error) or type(error).__name__).encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        transport.refuse(_CARD.pack(False, b"", 0, 0) + text)
        raise


# a group may be given as a process group or, unregistered, as a backend of its own
_GROUPS: Any = (dist.ProcessGroup, Backend)

# --- finding a group's transport --------------------------------------------------------------------------------------

# The one piece of module state: a group's private channels live as long as the group does.
_transports: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_being_made: weakref.WeakSet[Any] = weakref.WeakSet()
_transports_lock = threading.Lock()


def transport_of(group: Any, op: str = "flashoverlap", like: object = None) -> Any:
    """The transport of a process group for tensors of one kind of device, made at first use and again after a failure.

    Making one is a collective of the group, like any other: all its ranks must call, and a rank that is in several
    groups must call for them in the same order as their other ranks, lest two wait for each other until the time-out.

    Args:
        group: a process group, a one-dimensional DeviceMesh, or a transport.
        op: public name of the operator that asks, for error messages.
        like: a tensor on the device in question; a CPU tensor unless given.

    Raises:
        ValueError: no group, a mesh of several dimensions, a group that this rank is not in, or one that has no gloo
            backend for CPU tensors.
        TypeError: anything else.
        PeerError: a rank of the group is gone or did not call within the time-out.
        RuntimeError: two threads at once.
    """
    group = _process_group(group)
    if not isinstance(group, _GROUPS):
        return group
    device = like.device.type if isinstance(like, torch.Tensor) else "cpu"
    with _transports_lock:
        found = _transports.setdefault(group, {}).get(device)
        if found is not None and not found.failed:
            return found
        if group in _being_made:
            raise RuntimeError(f"{op}: another thread is about to use this group; give a second thread one of its own")
        _being_made.add(group)
    try:
        with naming(op):
            found = _transports[group][device] = _make(group, device)
    finally:
        _being_made.discard(group)
    return found


def known_transport(group: Any, like: torch.Tensor) -> Any | None:
    """What :func:`transport_of` gives, where it need not be made; None where it would have to be."""
    group = _process_group(group)
    if not isinstance(group, _GROUPS):
        return group
    with _transports_lock:
        found = _transports.get(group, {}).get(like.device.type)
    return None if found is None or found.failed else found


def new_transport(group: Any, op: str, like: torch.Tensor) -> Any:
    """A transport of its own over the ranks of ``group``, for what stays in flight while others use the group.

    Making it is a collective of the group, as with :func:`transport_of`, which names the errors; a transport is given
    back as it is.
    """
    group = _process_group(group)
    if not isinstance(group, _GROUPS):
        return group
    with naming(op):
        return _make(group, like.device.type)


def _process_group(group: Any) -> Any:
    if group is None:
        raise ValueError("group=None: the process group or one-dimensional DeviceMesh must be given explicitly")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not a member of the group that was given")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"a DeviceMesh of {group.ndim} dimensions {tuple(group.shape)}: one is needed, mesh['name']"
            )
        if group.get_coordinate() is None:
            raise ValueError("this rank is not a member of the DeviceMesh that was given")
        group = group.get_group()
    if isinstance(group, _GROUPS):
        if group.rank() < 0:  # pyright: ignore[reportAttributeAccessIssue]
            raise ValueError("this rank is not a member of the group that was given")
        return group
    if all(hasattr(group, name) for name in ("exchange_cards", "post", "collective")):
        return group
    raise TypeError(f"group must be a process group or a one-dimensional DeviceMesh, not {type(group).__name__}")


def _make(group: Any, device: str) -> Any:
    # late: they are made of what this module defines
    from .device import Device
    from .gloo import Gloo
    from .rendezvous import gloo_backend

    if group.size() == 1:
        return Silent()
    if device != "cpu":
        try:
            group._get_backend(torch.device(device))
        except (AttributeError, RuntimeError):
            raise ValueError(f"the group has no backend for {device} tensors") from None
        return Device(group)
    if gloo_backend(group) is None:
        raise ValueError("the group has no gloo backend, which CPU tensors need")
    return Gloo(group)
