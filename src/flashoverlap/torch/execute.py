"""Running one rank's program: the executor's one loop.

[Note: order] The program is issued in order. An exchange is posted and never blocks; a Compute first waits for what it
reads. At the end all that is still under way is waited for, since the caller may then write to what was sent.

[Note: ready early] A sender may be ahead, and where its data leaves only once the receiver is ready the wire would
stand idle until then. So before the first computation, after the exchanges that precede it, the transport may get ready
for all receives of the program. They come in program order from each rank either way, and every name is received once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..schedule import Compute, Exchange, Program, Schedule
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
    """Runs this rank's program of ``schedule``.

    Args:
        schedule: the programs of all ranks; sizes were agreed on beforehand.
        transport: a :class:`~flashoverlap.torch.transport.Transport`.
        buffers: gives the contiguous tensor of every name that is exchanged or part of a collective.
        kernels: by kernel name, what runs a Compute; "" runs those that only add.
        spans: where given, a span of every computation, wait and transfer is appended.

    Raises:
        PeerError: a peer died or stalled; the transport is then of no more use.
    """
    try:
        return _run(schedule, transport, buffers, kernels, spans)
    except BaseException as error:
        transport.fail(error)  # transfers may be unfinished, and the peers wait for ours
        raise


def _run(
    schedule: Schedule,
    transport: Any,
    buffers: Callable[[str], torch.Tensor],
    kernels: Mapping[str, Kernel],
    spans: list[Span] | None,
) -> Outcome:
    program = schedule.programs[transport.rank]
    arriving: dict[str, Any] = {}
    expected: dict[str, Any] | None = None
    leaving: list[tuple[Exchange, Any]] = []
    blocked_s, sent_bytes = 0.0, 0
    clock = time.monotonic
    for index, op in enumerate(program):
        if isinstance(op, Compute):
            if expected is None:
                expected = _expect(program[index:], transport, buffers)
            for name in op.reads + op.adds:
                ticket = arriving.get(name)
                if ticket is not None:
                    blocked_s += _wait(ticket, name, transport.rank, spans)
            if spans is None:
                kernels[op.kernel](op)
            else:
                begin = clock()
                kernels[op.kernel](op)
                spans.append(Span(transport.rank, "compute", str(op), begin, clock()))
        elif isinstance(op, Exchange):
            data = buffers(op.send)
            early = expected.get(op.recv) if expected else None
            sent, received = transport.post(data, op.to, buffers(op.recv), op.frm, arriving.get(op.send), early)
            arriving[op.recv] = received
            leaving.append((op, sent))
            sent_bytes += data.numel() * data.element_size()
        else:
            reads = [buffers(name) for name in op.reads]
            ticket = transport.collective(op.kind, reads, [buffers(name) for name in op.writes])
            arriving.update(dict.fromkeys(op.writes, ticket))
            sent_bytes += _least_bytes(op.kind, reads, transport.rank, transport.world_size)
    for name, ticket in arriving.items():
        blocked_s += _wait(ticket, name, transport.rank, spans)
    for op, ticket in leaving:
        blocked_s += _wait(ticket, op.send, transport.rank, spans)
    if spans is not None:
        _add_transfers(spans, schedule, transport.rank, arriving, leaving)
    return Outcome(blocked_s, sent_bytes)


def _expect(program: Program, transport: Any, buffers: Callable[[str], torch.Tensor]) -> dict[str, Any]:
    """Gets ready for all receives to come ([Note: ready early])."""
    return {op.recv: transport.expect(buffers(op.recv), op.frm) for op in program if isinstance(op, Exchange)}


def _least_bytes(kind: str, reads: Sequence[torch.Tensor], rank: int, world_size: int) -> int:
    """The bytes that a collective has to send from this rank, however the backend does it."""
    own = reads[0] if kind == "all_gather" else reads[rank]
    gathered, scattered = own.nbytes * (world_size - 1), sum(read.nbytes for read in reads) - own.nbytes
    return {"all_gather": gathered, "all_reduce": gathered + scattered}.get(kind, scattered)


def _wait(ticket: Any, name: str, rank: int, spans: list[Span] | None) -> float:
    if spans is None:
        return ticket.wait()
    begin = time.monotonic()
    seconds = ticket.wait()
    if seconds:
        spans.append(Span(rank, "blocked", f"wait for {name}", begin, time.monotonic()))
    return seconds


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
