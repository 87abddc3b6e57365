"""The transport for CPU tensors: private gloo groups, one a direction.

[Note: a group per direction] Gloo sends only once the receiver is ready, and the word that it is waits in the same
queue as the receiver's own bulk data for that peer. With one group for both directions two ranks can take turns instead
of sending at once. So ranks send upwards in one group and downwards in another.

[Note: one after another] Sends posted at once share the wire and all arrive late. Sends to one peer queue by
themselves; as soon as a call sends to several, a thread posts each one when the one before has left.

[Note: who waits] Gloo cannot be polled, and a receive that has begun outlives its sender's death until the time-out.
So a thread waits for the transfers (and notes when each was done), while the program waits for that thread, and
meanwhile probes the peer with a message that nobody will take: to a peer that is gone it cannot be posted.

[Note: hanging up] Letting go of a gloo group closes nothing while a thread still waits in it. But gloo closes all
connections of a group as soon as a wait in it expires. So whoever gives up waits a millisecond for what never comes.

[Note: the end of a process] A thread that still waits in gloo when the interpreter ends takes the process down with
SIGABRT. Yet a program may well end with something in flight, as new parameters are after the last step of an optimizer.
So the end waits for it as long as anything still arrives, and hangs up on the rest; at once after an error.
"""

from __future__ import annotations

import atexit
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import torch

from ..trace import Span
from .collectives import COLLECTIVES
from .errors import PeerError, reason
from .lastwords import LastWords
from .planned import Planned
from .rendezvous import members, private_groups
from .staging import Staging
from .transport import CARD_BYTES, DONE

# 3 is that of lastwords.py
_DATA_TAG, _PROBE_TAG, _NEVER_TAG, _CARD_TAG, _CARD_TAGS = 1, 2, 4, 16, 1 << 30
_PROBE_S = 0.1
_PATIENCE_S = 10.0  # at the end of the process, for the next transfer to be over
_LIVE: weakref.WeakSet[Gloo] = weakref.WeakSet()


class _State:
    """What the waiting threads share with the transport: the first error, and what peers said before they hung up."""

    def __init__(self, words: LastWords) -> None:
        self.error: PeerError | None = None
        self.words = words
        self.completed = 0  # transfers of all threads
        self._lock = threading.Lock()

    def fail(self, message: str, error: BaseException, peer: int | None = None) -> None:
        """Keeps the first error; ``peer`` is the rank whose connection failed, if that is what happened."""
        with self._lock:
            if self.error is None:
                words = "" if peer is None else self.words.heard(peer)
                self.error = PeerError(f"rank {peer} gave up: {words}" if words else f"{message} ({reason(error)})")


class _Transfer:
    """A ticket that one of the threads completes."""

    __slots__ = ("_gate", "_probe", "_state", "after", "done_s", "finish", "name", "peer", "posted_s", "start", "work")

    def __init__(self, state: _State, probe: Callable[[int | None], None], peer: int | None, name: str) -> None:
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
                self._state.completed += 1
                self.work = self.start = self.after = None  # and what they hold
        except Exception as error:
            if self.peer is None:
                self._probe(None)  # a collective does not say who died
            self._state.fail(f"{self.name} failed", error, self.peer)
        finally:
            self._gate.release()

    @property
    def arrived(self) -> bool:
        """Whether a thread has completed it."""
        return not self._gate.locked()

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
        """Lets the thread end once it is through, and waits for that if it can be soon."""
        self._queue.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join(_PROBE_S)


class Gloo(Planned):
    """Pieces of CPU tensors over gloo, between the ranks of ``group``.

    Building it is collective over the group and uses the group for a few small messages with a tag of their own;
    afterwards the group is left alone. A transport that has failed is replaced at the next call.
    """

    def __init__(self, group: Any, device: torch.device = torch.device("cpu")) -> None:
        self.rank: int = group.rank()
        self.world_size: int = group.size()
        self.members = members(group)
        self.staging = Staging()
        self.spans: list[Span] | None = None
        self.busy = threading.Lock()
        self._peers = [rank for rank in range(self.world_size) if rank != self.rank]
        self._groups = private_groups(group, device, ("up", "down"))
        self._state = _State(LastWords(self.rank, self.world_size, self._group))
        self._open = threading.Lock()  # until somebody has hung up
        self.calls = 0
        self._unclaimed: list[Any] = []
        # never received; what is no longer kept can no longer be received, which is just as well
        self._probes: deque[Any] = deque(maxlen=16)
        self._byte = torch.zeros(1, dtype=torch.uint8)
        self._sent_to: int | None = None
        self._last_sent: Any = DONE
        self._threads: dict[str, _Waiter] = {}
        self._finalizer = weakref.finalize(self, _close, self._threads)
        self._finalizer.atexit = False
        _LIVE.add(self)

    @property
    def failed(self) -> bool:
        """Whether a peer has died or an error has left transfers unfinished; a failed transport is of no more use."""
        return self._state.error is not None

    def _group(self, source: int, target: int) -> Any:
        return self._groups[source < target]  # [Note: a group per direction]

    def exchange_cards(self, card: bytes) -> list[bytes]:
        """Every rank's card; see :class:`~flashoverlap.torch.transport.Transport`."""
        cards, works = self._post_cards(card)
        peer = self.rank
        try:
            for peer, work in works:  # noqa: B007 - the message names the last one
                work.wait()
        except RuntimeError as error:
            raise self._give_up(f"rank {peer} of the group is gone or did not call in time", error, peer) from error
        self._unclaimed.clear()  # all are in this call, so through with those before
        return [part.numpy().tobytes() for part in cards]

    def refuse(self, card: bytes) -> None:
        """Leaves a card for each peer's next call; see :class:`~flashoverlap.torch.transport.Transport`."""
        with suppress(PeerError):
            # theirs are received as well, or their sends would never end
            self._unclaimed.append(self._post_cards(card))

    def _post_cards(self, card: bytes) -> tuple[list[torch.Tensor], list[tuple[int, Any]]]:
        """Posts the exchange of cards with every peer: the cards by rank, and (peer, work) to wait for."""
        self.calls += 1
        if self._last_sent.arrived:  # else some of this call's may not have been posted yet, and must not be overtaken
            self._sent_to = None
        tag = _CARD_TAG + self.calls % _CARD_TAGS
        cards = [torch.empty(CARD_BYTES, dtype=torch.uint8) for _ in range(self.world_size)]
        cards[self.rank] = mine = torch.frombuffer(bytearray(card), dtype=torch.uint8)
        peer = self.rank
        try:
            receives = [
                (peer := rank, self._group(rank, self.rank).recv([cards[rank]], rank, tag)) for rank in self._peers
            ]
            sends = [(peer := rank, self._group(self.rank, rank).send([mine], rank, tag)) for rank in self._peers]
        except RuntimeError as error:
            raise self._give_up(f"rank {peer} of the group is gone", error, peer) from error
        return cards, receives + sends

    def expect(self, recv: torch.Tensor, frm: int) -> _Transfer | Any:
        """Posts a receive; see :class:`~flashoverlap.torch.transport.Transport`."""
        if not recv.numel():
            return DONE
        arriving = self._transfer(frm, f"the receive from rank {frm}")
        try:
            arriving.work = self._group(frm, self.rank).recv([recv], frm, _DATA_TAG)
        except RuntimeError as error:
            raise self._give_up(f"rank {frm} of the group is gone", error, frm) from error
        self._thread("in").put(arriving)
        return arriving

    def post(
        self, send: torch.Tensor, to: int, recv: torch.Tensor, frm: int, after: Any = None, expected: Any = None
    ) -> tuple[_Transfer | Any, _Transfer | Any]:
        """Posts both halves of an exchange; see :class:`~flashoverlap.torch.transport.Transport`."""
        arriving = expected or self.expect(recv, frm)
        if not send.numel():
            return DONE, arriving
        leaving = self._transfer(to, f"the send to rank {to}")
        leaving.start = partial(self._group(self.rank, to).send, [send], to, _DATA_TAG)
        leaving.after = after if isinstance(after, _Transfer) else None
        try:
            if leaving.after is None and self._sent_to in (None, to):  # [Note: one after another]
                leaving.work = leaving.start()
                self._sent_to = to
            else:
                self._sent_to = -1
        except RuntimeError as error:
            raise self._give_up(f"rank {to} of the group is gone", error, to) from error
        self._thread("out").put(leaving)
        self._last_sent = leaving
        return leaving, arriving

    def collective(self, kind: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Any:
        """Starts a collective of gloo's own; pieces are padded to one size, since gloo wants that."""
        ticket = self._transfer(None, f"{kind} with rank {', '.join(map(str, self._peers))}")
        try:
            ticket.work, ticket.finish = COLLECTIVES[kind](self._groups[0], self.rank, reads, writes)
        except RuntimeError as error:
            raise self._give_up(f"{ticket.name} could not start", error) from error
        self._thread("in").put(ticket)
        return ticket

    def fail(self, error: BaseException) -> None:
        """Tells the peers and closes the private groups; see :class:`~flashoverlap.torch.transport.Transport`."""
        self._give_up("the call was broken off", error)

    def end(self, patience_s: float) -> None:
        """Ends the threads ([Note: the end of a process]): no transfer may be over for so long."""
        threads = [waiter.thread for waiter in self._threads.values()]
        for waiter in self._threads.values():
            waiter.put(None)
        seen, since_s = self._state.completed, time.monotonic()
        while any(thread.is_alive() for thread in threads) and not self.failed:
            for thread in threads:
                thread.join(_PROBE_S / len(threads))
            if self._state.completed != seen:
                seen, since_s = self._state.completed, time.monotonic()
            elif time.monotonic() - since_s > patience_s:
                self._give_up("its process ends", PeerError("before these transfers are over"))
            else:
                self._probe(None)
        for thread in threads:
            thread.join(1.0)

    def _transfer(self, peer: int | None, name: str) -> _Transfer:
        return _Transfer(self._state, self._probe, peer, name)

    def _thread(self, way: str) -> _Waiter:
        found = self._threads.get(way)
        if found is None:
            found = self._threads[way] = _Waiter(f"flashoverlap-{way}-{self.rank}")
        return found

    def _probe(self, peer: int | None) -> None:
        """Posts a byte that is never received, which fails once the connection is closed ([Note: who waits])."""
        for other in self._peers if peer is None else [peer]:
            try:
                self._probes.append(self._group(self.rank, other).send([self._byte], other, _PROBE_TAG))
            except RuntimeError as error:
                if "Application timeout" not in str(error):  # else the thread whose wait has expired will say more
                    self._give_up(f"rank {other} of the group is gone", error, other)

    def _give_up(self, message: str, error: BaseException, peer: int | None = None) -> PeerError:
        """Notes the error unless there is one, says so to the peers and hangs up ([Note: hanging up])."""
        self._state.fail(message, error, peer)
        assert self._state.error is not None
        if self._open.acquire(blocking=False):  # never released
            self._state.words.tell(str(self._state.error))
            for group, other in product(self._groups, self._peers):  # whoever has hung up already is waited for in vain
                with suppress(RuntimeError):
                    group.recv([self._byte], other, _NEVER_TAG).wait(timedelta(milliseconds=1))
            _close(self._threads)
        return self._state.error


@atexit.register
def _end() -> None:
    for transport in list(_LIVE):
        transport.end(0.0 if getattr(sys, "last_value", None) is not None else _PATIENCE_S)


def _close(threads: dict[str, _Waiter]) -> None:
    for waiter in threads.values():
        waiter.close()
    threads.clear()
