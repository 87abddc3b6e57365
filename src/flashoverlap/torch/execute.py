"""Running one rank's program: the executor's one loop, in one go or with pauses.

[Note: order] The program is issued in order. An exchange is posted and never blocks; a Compute first waits for what it
reads. At the end all that is still under way is waited for, since the caller may then write to what was sent.

[Note: ready early] A sender may be ahead, and where its data leaves only once the receiver is ready the wire would
stand idle until then. So before the first computation, after the exchanges that precede it, the transport may get
ready for all receives of the program (of a run that is left open: for those up to there). They come in program
order from each rank either way, and every name is received once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..schedule import Collective, Compute, Exchange, Program, Schedule
from ..trace import Span

Kernel = Callable[[Compute], None]


class Outcome(NamedTuple):
    """What one run cost: seconds that the program stood waiting, and bytes that it sent (at least, in a collective)."""

    blocked_s: float
    sent_bytes: int


def execute(
    schedule: Schedule,
    transport: Any,
    buffers: Callable[[str], torch.Tensor],
    kernels: Mapping[str, Kernel],
    spans: list[Span] | None = None,
) -> Outcome:
    """Runs this rank's program of ``schedule``, from its beginning to its end.

    Args:
        schedule: the programs of all ranks; sizes were agreed on beforehand.
        transport: a :class:`~flashoverlap.torch.transport.Transport`.
        buffers: gives the contiguous tensor of every name that is exchanged or part of a collective.
        kernels: by kernel name, what runs a Compute; "" runs those that only add.
        spans: where given, a span of every computation, wait and transfer is appended.

    Raises:
        PeerError: a peer died or stalled; the transport is then of no more use.
    """
    return Run(schedule, transport, buffers, kernels, spans).finish()


class Run:
    """This rank's program of a schedule, which may be left open and taken up again behind other work.

    [Note: open runs] A run stands still where its next Compute would have to wait, never between two others. So what
    is posted by when depends on the program alone: ranks that begin and take up the same runs of one transport in the
    same order post the same exchanges in the same order.

    Args: those of :func:`execute`. After an error of any method the transport is of no more use.
    """

    def __init__(
        self,
        schedule: Schedule,
        transport: Any,
        buffers: Callable[[str], torch.Tensor],
        kernels: Mapping[str, Kernel],
        spans: list[Span] | None = None,
    ) -> None:
        self._schedule, self._transport, self._spans = schedule, transport, spans
        self._buffers, self._kernels = buffers, kernels
        self._program = schedule.programs[transport.rank]
        self._next = 0
        self._arriving: dict[str, Any] = {}
        self._leaving: list[tuple[Exchange, Any]] = []
        self._blocked_s, self._sent_bytes = 0.0, 0

    def post(self) -> None:
        """Posts the exchanges that come before the first Compute still to be issued."""
        self._guarded(self._stop(lambda op, index: True))

    def advance(self) -> None:
        """Issues the operation that it stands at, waiting for what that reads, and on up to the next such wait."""
        here = self._next

        def waits(op: Compute, index: int) -> bool:
            return index > here and any(name in self._arriving for name in op.reads + op.adds)

        self._guarded(self._stop(waits))

    @property
    def arrived(self) -> bool:
        """Whether what it stands at need not be waited for: the next Compute, or the end of all transfers."""
        if self._next < len(self._program):
            op = self._program[self._next]
            names = op.reads + op.adds if isinstance(op, Compute) else ()
        else:
            names = tuple(self._arriving)
            if not all(ticket.arrived for _, ticket in self._leaving):
                return False
        return all(self._arriving[name].arrived for name in names if name in self._arriving)

    @property
    def through(self) -> bool:
        """Whether all operations have been issued; transfers may still be under way."""
        return self._next == len(self._program)

    def finish(self) -> Outcome:
        """Issues all that is left and waits for all that is under way; what it has moved is let go of."""
        self._guarded(len(self._program), to_the_end=True)
        # whoever gave these holds the run: nothing is to stay in memory until Python has found the cycle
        self._arriving, self._leaving, self._kernels, self._buffers = {}, [], {}, _none
        return Outcome(self._blocked_s, self._sent_bytes)

    def _stop(self, stops: Callable[[Compute, int], bool]) -> int:
        """Where the program comes to a Compute of this kind; what an exchange before it posts counts as arriving."""
        kept, self._arriving = self._arriving, dict(self._arriving)
        try:
            for index in range(self._next, len(self._program)):
                op = self._program[index]
                if isinstance(op, Compute):
                    if stops(op, index):
                        return index
                else:
                    writes = (op.recv,) if isinstance(op, Exchange) else op.writes
                    self._arriving.update(dict.fromkeys(writes))
            return len(self._program)
        finally:
            self._arriving = kept

    def _guarded(self, stop: int, to_the_end: bool = False) -> None:
        try:
            self._issue(stop)
            if to_the_end:
                self._wait_for_all()
        except BaseException as error:
            self._transport.fail(error)  # transfers may be unfinished, and the peers wait for ours
            raise

    def _issue(self, stop: int) -> None:
        expected: dict[str, Any] | None = None
        for index in range(self._next, stop):
            op = self._program[index]
            self._next = index + 1
            if isinstance(op, Compute):
                if expected is None:
                    expected = _expect(self._program[index:stop], self._transport, self._buffers)
                self._compute(op)
            elif isinstance(op, Exchange):
                self._exchange(op, expected.get(op.recv) if expected else None)
            else:
                self._collective(op)

    def _compute(self, op: Compute) -> None:
        for name in op.reads + op.adds:
            ticket = self._arriving.get(name)
            if ticket is not None:
                self._wait(ticket, name)
        if self._spans is None:
            self._kernels[op.kernel](op)
            return
        begin = time.monotonic()
        self._kernels[op.kernel](op)
        self._spans.append(Span(self._transport.rank, "compute", str(op), begin, time.monotonic()))

    def _exchange(self, op: Exchange, early: Any) -> None:
        data, arriving = self._buffers(op.send), self._buffers(op.recv)
        after = self._arriving.get(op.send)
        sent, self._arriving[op.recv] = self._transport.post(data, op.to, arriving, op.frm, after, early)
        self._leaving.append((op, sent))
        self._sent_bytes += data.nbytes

    def _collective(self, op: Collective) -> None:
        transport, reads = self._transport, [self._buffers(name) for name in op.reads]
        ticket = transport.collective(op.kind, reads, [self._buffers(name) for name in op.writes])
        self._arriving.update(dict.fromkeys(op.writes, ticket))
        self._sent_bytes += _least_bytes(op.kind, reads, transport.rank, transport.world_size)

    def _wait_for_all(self) -> None:
        for name, ticket in self._arriving.items():
            self._wait(ticket, name)
        for op, ticket in self._leaving:
            self._wait(ticket, op.send)
        if self._spans is not None:
            _add_transfers(self._spans, self._schedule, self._transport.rank, self._arriving, self._leaving)

    def _wait(self, ticket: Any, name: str) -> None:
        if self._spans is None:
            self._blocked_s += ticket.wait()
            return
        begin = time.monotonic()
        seconds = ticket.wait()
        self._blocked_s += seconds
        if seconds:
            self._spans.append(Span(self._transport.rank, "blocked", f"wait for {name}", begin, time.monotonic()))


def _none(name: str) -> torch.Tensor:
    raise KeyError(f"{name}: the run is over")


def _expect(program: Program, transport: Any, buffers: Callable[[str], torch.Tensor]) -> dict[str, Any]:
    """Gets ready for all receives to come ([Note: ready early])."""
    return {op.recv: transport.expect(buffers(op.recv), op.frm) for op in program if isinstance(op, Exchange)}


def _least_bytes(kind: str, reads: Sequence[torch.Tensor], rank: int, world_size: int) -> int:
    """The bytes that a collective has to send from this rank, however the backend does it."""
    own = reads[0] if kind == "all_gather" else reads[rank]
    gathered, scattered = own.nbytes * (world_size - 1), sum(read.nbytes for read in reads) - own.nbytes
    return {"all_gather": gathered, "all_reduce": gathered + scattered}.get(kind, scattered)


def _add_transfers(
    spans: list[Span],
    schedule: Schedule,
    rank: int,
    arriving: Mapping[str, Any],
    leaving: list[tuple[Exchange, Any]],
) -> None:
    """Adds the halves of transfers as this rank knows them: from their posting until they were done with here."""
    for op, ticket in leaving:
        if ticket.done_s:
            size = schedule.size(op.send).bytes
            spans.append(Span(rank, "send", f"{op.send} to {op.to}", ticket.posted_s, ticket.done_s, size, op.to))
    for ticket, name in {ticket: name for name, ticket in arriving.items()}.items():  # a collective has one for all
        if ticket.done_s and ticket.peer is None:
            spans.append(Span(rank, "recv", ticket.name, ticket.posted_s, ticket.done_s))
        elif ticket.done_s:
            size = schedule.size(name).bytes
            spans.append(Span(rank, "recv", name, ticket.posted_s, ticket.done_s, size, ticket.peer))
