"""The transport for CPU tensors: private gloo groups, one a direction.

[Note: a group per direction] Gloo sends only once the receiver is ready, and the word that it is waits in the same
queue as the receiver's own bulk data for that peer. With one group for both directions two ranks can take turns instead
of sending at once. So ranks send upwards in one group and downwards in another.

[Note: one after another] Sends posted at once share the wire and all arrive late. Sends to one peer queue by
themselves; as soon as a call sends to several, a thread posts each one when the one before has left.

[Note: who waits] Gloo cannot be polled, and a receive that has begun outlives its sender's death until the time-out.
So a thread waits for the transfers (and notes when each was done), while the program waits for that thread, and
meanwhile probes the peer with a message that nobody will take: to a peer that is gone it cannot be posted.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from .staging import Staging
from .transport import CARD_BYTES, DONE, PeerError

_DATA_TAG, _PROBE_TAG, _CARD_TAG, _CARD_TAGS = 1, 2, 16, 1 << 20
_PROBE_S = 0.1


def gloo_backend(group: Any) -> Any | None:
    """The gloo backend of a process group, or None where it has none for CPU tensors."""
    if isinstance(group, dist.ProcessGroupGloo):
        return group
    try:
        backend = group._get_backend(torch.device("cpu"))
    except (AttributeError, RuntimeError):
        return None
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


class GroupStore(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """A key-value store made of a group's own all-gather: what new groups of the same ranks are built over."""

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__()
        self._group, self._device = group, device
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Keeps a value until some rank asks."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The value of ``key``; where it is another rank's, all ranks share what they have."""
        if key not in self._values:
            self._share()
        return self._values[key]

    def wait(self, keys: list[str], timeout: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns when all keys are there."""
        for key in keys:
            self.get(key)

    def _share(self) -> None:
        mine = torch.frombuffer(bytearray(pickle.dumps(self._values)), dtype=torch.uint8)
        lengths = self._all_gather(torch.tensor([mine.numel()]))
        padded = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        for length, theirs in zip(lengths, self._all_gather(padded), strict=True):
            self._values.update(pickle.loads(bytes(theirs[: int(length)].tolist())))

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        tensor = tensor.to(self._device)
        gathered = [torch.empty_like(tensor) for _ in range(self._group.size())]
        self._group.allgather([gathered], [tensor]).wait()
        return [part.cpu() for part in gathered]


class _State:
    """What the waiting threads share with the transport, without keeping it alive."""

    def __init__(self) -> None:
        self.error: PeerError | None = None
        self.lock = threading.Lock()

    def fail(self, error: PeerError) -> None:
        with self.lock:
            self.error = self.error or error


class _Transfer:
    """A ticket that one of the threads completes."""

    __slots__ = ("_gate", "_probe", "_state", "after", "done_s", "finish", "name", "peer", "posted_s", "start", "work")

    def __init__(self, state: _State, probe: Callable[[int], None], peer: int, name: str) -> None:
        self._state, self._probe, self.peer, self.name = state, probe, peer, name
        self._gate = threading.Lock()
        self._gate.acquire()
        self.work: Any = None
        self.start: Callable[[], Any] | None = None
        self.after: _Transfer | None = None
        self.finish: Callable[[], None] | None = None
        self.posted_s = time.monotonic()
        self.done_s = 0.0

    def complete(self) -> None:
        """On a thread: posts what has not been posted, waits until it is done, opens the gate."""
        try:
            if self._state.error is None:
                if self.after is not None:
                    self.after.wait()
                if self.work is None and self.start is not None:
                    self.work = self.start()
                assert self.work is not None
                self.work.wait()
                self.done_s = time.monotonic()
        except PeerError as error:
            self._state.fail(error)
        except Exception as error:
            self._state.fail(PeerError(f"{self.name} failed: {_first_line(error)}"))
        finally:
            self._gate.release()

    def wait(self) -> float:
        """Waits at the gate, probing the peer meanwhile; returns the seconds that this took."""
        blocked_s = 0.0
        if not self._gate.acquire(blocking=False):
            begin = time.perf_counter()
            while not self._gate.acquire(timeout=_PROBE_S):
                self._probe(self.peer)
                if self._state.error is not None:
                    raise self._state.error
            blocked_s = time.perf_counter() - begin
        self._gate.release()
        if self._state.error is not None:
            raise self._state.error
        if self.finish is not None:
            self.finish()
            self.finish = None
        return blocked_s


class _Waiter:
    """A thread that completes transfers in the order in which they were handed to it."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_Waiter._run, args=(self._queue,), name=name, daemon=True)
        self.thread.start()
        self.put = self._queue.put

    @staticmethod
    def _run(jobs: queue.SimpleQueue[_Transfer | None]) -> None:
        while (job := jobs.get()) is not None:
            job.complete()
            del job

    def close(self) -> None:
        """Lets the thread end once it is through."""
        self._queue.put(None)


class Gloo:
    """Pieces of CPU tensors over gloo, between the ranks of ``group``.

    Building it is collective over the group and uses the group for two small all-gathers; afterwards the group's own
    messages are left alone. A transport that has failed is replaced at the next call.
    """

    def __init__(self, group: Any, device: torch.device | None = None) -> None:
        self.rank: int = group.rank()
        self.world_size: int = group.size()
        self.staging = Staging()
        self.busy = threading.Lock()
        backend = gloo_backend(group)
        store = GroupStore(group, device or torch.device("cpu"))
        self._groups = [_private_group(PrefixStore(way, store), group, backend) for way in ("up", "down")]
        self._state = _State()
        self._calls = 0
        self._unclaimed: list[Any] = []
        self._probes: list[Any] = []
        self._sent_to: int | None = None
        self._threads: dict[str, _Waiter] = {}
        self._finalizer = weakref.finalize(self, _close, self._threads)

    @property
    def failed(self) -> bool:
        """Whether a peer has died or an error has left transfers unfinished; a failed transport is of no more use."""
        return self._state.error is not None

    def _group(self, source: int, target: int) -> Any:
        return self._groups[source < target]  # [Note: a group per direction]

    def exchange_cards(self, card: bytes) -> list[bytes]:
        """Every rank's card; see :class:`~flashoverlap.torch.transport.Transport`."""
        tag = self._next_tag()
        mine = torch.frombuffer(bytearray(card), dtype=torch.uint8)
        theirs = [torch.empty(CARD_BYTES, dtype=torch.uint8) for _ in range(self.world_size)]
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        peer = self.rank
        try:
            receives = [(peer := rank, self._group(rank, self.rank).recv([theirs[rank]], rank, tag)) for rank in peers]
            sends = [(peer := rank, self._group(self.rank, rank).send([mine], rank, tag)) for rank in peers]
            for peer, work in receives + sends:  # noqa: B007 - the message names the last one
                work.wait()
        except RuntimeError as error:
            raise self._give_up(f"rank {peer} of the group is gone or did not call in time", error) from error
        theirs[self.rank] = mine
        return [part.numpy().tobytes() for part in theirs]

    def refuse(self, card: bytes) -> None:
        """Leaves a card for each peer's next call; see :class:`~flashoverlap.torch.transport.Transport`."""
        tag = self._next_tag()
        mine = torch.frombuffer(bytearray(card), dtype=torch.uint8)
        for rank in range(self.world_size):
            if rank != self.rank and not self.failed:
                try:
                    self._unclaimed.append((mine, self._group(self.rank, rank).send([mine], rank, tag)))
                except RuntimeError as error:
                    self._give_up(f"rank {rank} of the group is gone", error)

    def _next_tag(self) -> int:
        self._calls += 1
        self._sent_to = None
        return _CARD_TAG + self._calls % _CARD_TAGS

    def post(
        self, send: torch.Tensor, to: int, recv: torch.Tensor, frm: int, after: Any = None
    ) -> tuple[_Transfer | Any, _Transfer | Any]:
        """Posts both halves of an exchange; see :class:`~flashoverlap.torch.transport.Transport`."""
        arriving = leaving = DONE
        try:
            if recv.numel():
                arriving = self._transfer(frm, f"the receive from rank {frm}")
                arriving.work = self._group(frm, self.rank).recv([recv], frm, _DATA_TAG)
                self._thread("in").put(arriving)
            if send.numel():
                leaving = self._transfer(to, f"the send to rank {to}")
                leaving.start = partial(self._group(self.rank, to).send, [send], to, _DATA_TAG)
                leaving.after = after if isinstance(after, _Transfer) else None
                if leaving.after is None and self._sent_to in (None, to):  # [Note: one after another]
                    leaving.work = leaving.start()
                    self._sent_to = to
                else:
                    self._sent_to = -1
                self._thread("out").put(leaving)
        except RuntimeError as error:
            raise self._give_up(f"rank {to} or {frm} of the group is gone", error) from error
        return leaving, arriving

    def collective(self, kind: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Any:
        """Starts a collective of gloo's own; pieces are padded to one size, since gloo wants that."""
        ticket = self._transfer((self.rank + 1) % self.world_size, kind)
        try:
            ticket.work, ticket.finish = _COLLECTIVES[kind](self._groups[0], self.rank, reads, writes)
        except RuntimeError as error:
            raise self._give_up(f"{kind} could not start", error) from error
        self._thread("in").put(ticket)
        return ticket

    def fail(self, error: BaseException) -> None:
        """Closes the private groups, which the peers notice."""
        self._give_up("the call was broken off", error)

    def _transfer(self, peer: int, name: str) -> _Transfer:
        return _Transfer(self._state, self._probe, peer, name)

    def _thread(self, way: str) -> _Waiter:
        found = self._threads.get(way)
        if found is None:
            found = self._threads[way] = _Waiter(f"flashoverlap-{way}-{self.rank}")
        return found

    def _probe(self, peer: int) -> None:
        """Posts a byte that is never received, which fails once the connection is closed ([Note: who waits])."""
        try:
            byte = torch.zeros(1, dtype=torch.uint8)
            self._probes.append((byte, self._group(self.rank, peer).send([byte], peer, _PROBE_TAG)))
        except RuntimeError as error:
            self._give_up(f"rank {peer} of the group is gone", error)

    def _give_up(self, message: str, error: BaseException) -> PeerError:
        self._state.fail(PeerError(f"{message} ({_first_line(error)})"))
        self._groups = []
        _close(self._threads)
        assert self._state.error is not None
        return self._state.error


def _private_group(store: Any, group: Any, backend: Any) -> Any:
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    if backend is not None:
        options._timeout = backend.options._timeout
        options._devices = backend.options._devices
    else:
        options._timeout = timedelta(minutes=30)
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), options)


def _close(threads: dict[str, _Waiter]) -> None:
    for waiter in threads.values():
        waiter.close()
    threads.clear()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- gloo's own collectives, on pieces of unequal size ----------------------------------------------------------------


def _padded(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """The pieces as rows of one tensor, each padded to the largest."""
    block = pieces[0].new_zeros(len(pieces), max(piece.numel() for piece in pieces))
    for row, piece in zip(block, pieces, strict=True):
        row[: piece.numel()] = piece.flatten()
    return block


def _unpad(block: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    for row, piece in zip(block, pieces, strict=True):
        piece.flatten().copy_(row[: piece.numel()])


def _all_gather(group: Any, rank: int, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Any:
    if all(write.numel() == reads[0].numel() for write in writes):
        # what is gathered is the caller's, and gloo would write it back
        outputs = [torch.empty_like(write) if other == rank else write for other, write in enumerate(writes)]
        return group.allgather([outputs], [reads[0]]), None
    largest = max(write.numel() for write in writes)
    mine = reads[0].new_zeros(largest)
    mine[: reads[0].numel()] = reads[0].flatten()
    block = mine.new_empty(len(writes), largest)
    others = [other for other in range(len(writes)) if other != rank]
    return group.allgather([list(block)], [mine]), lambda: _unpad(block[others], [writes[other] for other in others])


def _reduce_scatter(group: Any, rank: int, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Any:
    block = _padded(reads)
    mine = block.new_empty(block.shape[1])
    return group._reduce_scatter_base(mine, block.flatten()), lambda: _unpad(mine[None], writes)


def _all_reduce(group: Any, rank: int, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Any:
    block = torch.cat([read.flatten() for read in reads])

    def finish() -> None:
        for part, write in zip(block.split([write.numel() for write in writes]), writes, strict=True):
            write.flatten().copy_(part)

    return group.allreduce([block]), finish


def _all_to_all(group: Any, rank: int, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Any:
    sends, receives = [read.numel() for read in reads], [write.numel() for write in writes]
    block = torch.cat([read.flatten() for read in reads])
    arrived = block.new_empty(sum(receives))

    def finish() -> None:
        for part, write in zip(arrived.split(receives), writes, strict=True):
            write.flatten().copy_(part)

    return group.alltoall_base(arrived, block, receives, sends), finish


_COLLECTIVES = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
}
