"""Replays a schedule on a machine, event by event, and returns when everything happened.

It implements the sentence of :mod:`flashoverlap.schedule`, with these times:

* A transfer starts when both ranks have posted it, the sender's earlier sends have left and the receiver's earlier
  receives have come (up to ``ports`` in flight), and what it hands on has arrived. It holds both ports for
  ``latency_s + bytes / bytes_per_s``, so every message pays its latency.
* A collective starts when every rank has posted it and has nothing else in flight, and ends for all at once.
* A program ends when its last operation is done and its last transfer, sent or received, is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from .costs import collective_cost, compute_seconds
from .machine import Machine
from .schedule import Collective, Compute, Exchange, Program, Schedule, ScheduleError
from .trace import Span, Totals, Trace


def simulate(schedule: Schedule, machine: Machine, *, spans: bool = True) -> Trace:
    """Replays ``schedule`` on ``machine``.

    Args:
        spans: whether to keep every span. Without them the trace has only totals, which is faster and smaller.

    Raises:
        ScheduleError: the schedule cannot finish, names a rank that is not there, or a buffer without a size.
        ValueError: the schedule needs a kernel that the machine does not have.
    """
    _check_ranks(schedule)
    return _Replay(schedule, machine, spans).run()


@dataclass(slots=True, eq=False)
class _Rank:
    """Where one rank stands: in its program, and on its wire.

    [Note: one index for both directions] Every wire operation is one send and one receive (or a collective), so its
    place in ``wire`` numbers both. Sends and receives advance independently, each in order.
    """

    number: int
    program: Program
    next_op: int = 0  # index of the operation to issue next
    issued: bool = False  # whether its issue has been paid for
    unread: Iterator[str] | None = None  # what the next Compute reads and has not been waited for yet
    waits_for: int = -1  # index on the wire of what the program waits for
    running: Compute | None = None
    started_s: float = 0.0  # when the running Compute, or the wait, began
    finished: bool = False
    wire: list[Exchange | Collective] = field(default_factory=list)
    sent: int = 0  # how many have started to leave
    received: int = 0  # how many have started to come
    leaving: int = 0  # how many are in flight
    arriving: int = 0
    arrived: bytearray = field(default_factory=bytearray)
    latest: dict[str, int] = field(default_factory=dict)  # buffer -> index on the wire of its last posted receive
    needs: dict[int, int] = field(default_factory=dict)  # a send that hands on -> the receive that it waits for
    at_collective: bool = False
    left_s: float = 0.0  # work left of the running Compute as of since_s (only kept up with contention)
    since_s: float = 0.0
    slowness: float = 1.0
    version: int = 0  # counts reschedulings; an event of an older one is void
    compute_s: float = 0.0
    blocked_s: float = 0.0
    ended_s: float = 0.0


Handler = Callable[[_Rank, int], None]


class _Replay:
    """The clock, its agenda, and what happens at each event."""

    def __init__(self, schedule: Schedule, machine: Machine, keep_spans: bool) -> None:
        self.schedule, self.machine, self.ports = schedule, machine, machine.ports
        self.contention, self.issue_s = machine.contention, machine.issue_s
        self.ranks = [_Rank(number, program) for number, program in enumerate(schedule.programs)]
        self.spans: list[Span] | None = [] if keep_spans else None
        self.now = 0.0
        self.joined = 0  # ranks that have joined the next collective
        # [Note: agenda by time] Ranks of a regular schedule act at the same times, so events are kept in one list a
        # time and only the times in a heap: it stays short, and events of one time run in the order of their making.
        self.times: list[float] = []
        self.agenda: dict[float, list[tuple[Handler, _Rank, int]]] = {}
        self.compute_costs: dict[Compute, float] = {}
        self.transfer_costs: dict[str, float] = {}
        self.on_resume, self.on_arrival = self._resume, self._arrival  # bound once, not once an event

    def run(self) -> Trace:
        for rank in self.ranks:
            self._at(0.0, self.on_resume, rank, 0)
        times, agenda = self.times, self.agenda
        while times:
            self.now = now = heappop(times)
            for handler, rank, argument in agenda[now]:  # grows while it is walked, when something takes no time
                handler(rank, argument)
            del agenda[now]
        for rank in self.ranks:
            if not (rank.finished and rank.sent == rank.received == len(rank.wire)):
                raise _stuck(self.schedule, self.ranks)
        return self._trace()

    def _at(self, time: float, handler: Handler, rank: _Rank, argument: int) -> None:
        events = self.agenda.get(time)
        if events is None:
            self.agenda[time] = [(handler, rank, argument)]
            heappush(self.times, time)
        else:
            events.append((handler, rank, argument))

    def _trace(self) -> Trace:
        totals: list[Totals] = []
        for rank in self.ranks:
            end = rank.ended_s
            if end > rank.started_s:  # the program was through before its last transfer
                self._unblock(rank, "end", end)
            totals.append(Totals(0.0, end, rank.compute_s, rank.blocked_s))
        spans = sorted(self.spans or (), key=attrgetter("rank", "start_s", "track", "end_s", "name"))
        return Trace(tuple(totals), tuple(spans))

    # --- the program --------------------------------------------------------------------------------------------------

    def _resume(self, rank: _Rank, version: int) -> None:
        """Ends the running Compute, or the wait for its issue, and goes on with the program."""
        if version != rank.version:
            return
        op = rank.running
        if op is not None:
            rank.running = None
            rank.compute_s += self.now - rank.started_s
            if self.spans is not None:
                self.spans.append(_compute_span(rank, op, self.now))
        self._issue(rank)

    def _issue(self, rank: _Rank) -> None:
        """Issues operations until one takes time, or has to wait."""
        program, now = rank.program, self.now
        while rank.next_op < len(program):
            if self.issue_s and not rank.issued:
                rank.issued = True
                self._at(now + self.issue_s, self.on_resume, rank, rank.version)
                return
            op = program[rank.next_op]
            if isinstance(op, Compute):
                if not self._is_read(rank, op):
                    rank.started_s = now
                    return
                rank.next_op += 1
                rank.issued = False
                if self._compute(rank, op):
                    return
            else:
                rank.next_op += 1
                rank.issued = False
                self._post(rank, op)
        rank.finished = True
        rank.started_s = now
        rank.ended_s = max(rank.ended_s, now)

    def _is_read(self, rank: _Rank, op: Compute) -> bool:
        """Whether all that ``op`` reads is there; if not, notes what it waits for."""
        if rank.unread is None:
            rank.unread = iter(op.reads + op.adds)
        latest, arrived = rank.latest, rank.arrived
        for name in rank.unread:
            index = latest.get(name)
            if index is not None and not arrived[index]:
                rank.waits_for = index
                return False
        rank.unread = None
        return True

    def _compute(self, rank: _Rank, op: Compute) -> bool:
        """Starts ``op``; False if it takes no time."""
        seconds = self.compute_costs.get(op)
        if seconds is None:
            seconds = self.compute_costs[op] = compute_seconds(op, self.schedule, self.machine)
        rank.started_s = self.now
        if not seconds:
            if self.spans is not None:
                self.spans.append(_compute_span(rank, op, self.now))
            return False
        rank.running = op
        if self.contention:
            rank.left_s, rank.since_s = seconds, self.now
            seconds *= rank.slowness
        self._at(self.now + seconds, self.on_resume, rank, rank.version)
        return True

    def _unblock(self, rank: _Rank, name: str, now: float) -> None:
        """Ends a wait for buffer ``name``."""
        rank.blocked_s += now - rank.started_s
        if self.spans is not None and now > rank.started_s:
            self.spans.append(Span(rank.number, "blocked", name, rank.started_s, now))

    # --- the wire -----------------------------------------------------------------------------------------------------

    def _post(self, rank: _Rank, op: Exchange | Collective) -> None:
        index = len(rank.wire)
        rank.wire.append(op)
        rank.arrived.append(0)
        if isinstance(op, Exchange):
            need = rank.latest.get(op.send)
            if need is not None and not rank.arrived[need]:
                rank.needs[index] = need
            rank.latest[op.recv] = index
        else:
            rank.latest.update(dict.fromkeys(op.writes, index))
        if rank.sent == index:
            self._send(rank)
        if rank.received == index and isinstance(op, Exchange):
            self._send(self.ranks[op.frm])

    def _send(self, rank: _Rank) -> None:
        """Starts the next transfers out of ``rank``, as many as may leave now."""
        while rank.sent < len(rank.wire) and rank.leaving < self.ports:
            op = rank.wire[rank.sent]
            if not isinstance(op, Exchange):
                self._join(rank)
                return
            other = self.ranks[op.to]
            index = other.received
            if index == len(other.wire) or other.arriving == self.ports:
                return
            match = other.wire[index]
            if not isinstance(match, Exchange) or match.frm != rank.number:
                return
            if rank.needs:
                need = rank.needs.get(rank.sent)
                if need is not None:
                    if not rank.arrived[need]:
                        return
                    del rank.needs[rank.sent]
            self._start(rank, op, other, match)

    def _start(self, rank: _Rank, op: Exchange, other: _Rank, match: Exchange) -> None:
        """Starts the transfer of ``op.send`` from ``rank`` to ``match.recv`` on rank ``other``."""
        index = other.received
        rank.sent += 1
        rank.leaving += 1
        other.received += 1
        other.arriving += 1
        seconds = self.transfer_costs.get(op.send)
        if seconds is None:
            seconds = self.machine.transfer_s(self.schedule.size(op.send).bytes)
            self.transfer_costs[op.send] = seconds
        now, end = self.now, self.now + seconds
        self._at(end, self.on_arrival, other, index)
        if self.spans is not None:
            nbytes = self.schedule.size(op.send).bytes
            self.spans.append(Span(rank.number, "send", op.send, now, end, nbytes))
            self.spans.append(Span(other.number, "recv", match.recv, now, end, nbytes))
        if self.contention:
            self._rescale(rank)
            self._rescale(other)
        if other.arriving < self.ports:
            self._at(now, self._receive, other, 0)

    def _receive(self, rank: _Rank, _: int = 0) -> None:
        """Starts the next transfer into ``rank``, if its sender may send it now."""
        if rank.received < len(rank.wire):
            op = rank.wire[rank.received]
            if isinstance(op, Exchange):
                self._send(self.ranks[op.frm])
            else:
                self._join(rank)

    def _arrival(self, rank: _Rank, index: int) -> None:
        """Ends the transfer that is number ``index`` on the wire of its receiver."""
        op = rank.wire[index]
        assert isinstance(op, Exchange)
        sender = self.ranks[op.frm]
        sender.leaving -= 1
        rank.arriving -= 1
        rank.arrived[index] = 1
        rank.ended_s = sender.ended_s = self.now
        self._send(sender)
        self._receive(rank)
        if rank.needs:
            self._send(rank)
        if self.contention:
            self._rescale(sender)
            self._rescale(rank)
        if rank.waits_for == index:
            rank.waits_for = -1
            self._unblock(rank, op.recv, self.now)
            self._issue(rank)

    def _rescale(self, rank: _Rank) -> None:
        """Moves the end of the running Compute, if the wire of ``rank`` has become busy or idle."""
        busy = rank.leaving or rank.arriving
        slowness = 1.0 + self.contention if busy else 1.0
        if slowness == rank.slowness:
            return
        if rank.running is not None:
            rank.left_s = max(0.0, rank.left_s - (self.now - rank.since_s) / rank.slowness)
            rank.since_s = self.now
            rank.version += 1
            self._at(self.now + rank.left_s * slowness, self.on_resume, rank, rank.version)
        rank.slowness = slowness

    # --- collectives --------------------------------------------------------------------------------------------------

    def _join(self, rank: _Rank) -> None:
        """Lets ``rank`` join the collective that is next on its wire, once its earlier transfers are over."""
        if rank.sent != rank.received or rank.leaving or rank.arriving or rank.at_collective:
            return
        rank.at_collective = True
        self.joined += 1
        if self.joined < len(self.ranks):
            return
        self.joined = 0
        ops = [other.wire[other.sent] for other in self.ranks]
        seconds, moved = collective_cost([op for op in ops if isinstance(op, Collective)], self.schedule, self.machine)
        for other, op, nbytes in zip(self.ranks, ops, moved, strict=True):
            other.leaving = other.arriving = self.ports
            if self.contention:
                self._rescale(other)
            if self.spans is not None:
                kind, end = str(op).partition(" ")[0], self.now + seconds
                self.spans += (Span(other.number, track, kind, self.now, end, nbytes) for track in ("send", "recv"))
        self._at(self.now + seconds, self._part, rank, 0)

    def _part(self, _: _Rank, __: int) -> None:
        """Ends the collective on all ranks."""
        for rank in self.ranks:
            rank.arrived[rank.sent] = 1
            rank.sent += 1
            rank.received += 1
            rank.leaving = rank.arriving = 0
            rank.at_collective = False
            rank.ended_s = self.now
        for rank in self.ranks:
            self._send(rank)
            self._receive(rank)
            if self.contention:
                self._rescale(rank)
            if rank.waits_for >= 0 and rank.arrived[rank.waits_for]:
                rank.waits_for = -1
                self._unblock(rank, "collective", self.now)
                self._issue(rank)


def _compute_span(rank: _Rank, op: Compute, end_s: float) -> Span:
    return Span(rank.number, "compute", f"{op.kernel or 'add'} {','.join(op.writes)}", rank.started_s, end_s)


# --- schedules that cannot finish -------------------------------------------------------------------------------------


def _check_ranks(schedule: Schedule) -> None:
    ranks = range(schedule.ranks)
    for rank, program in enumerate(schedule.programs):
        for index, op in enumerate(program):
            if isinstance(op, Exchange) and not (op.to in ranks and op.frm in ranks):
                raise ScheduleError(f"{op} names a rank that is not one of {schedule.ranks}", schedule, rank, index)


def _stuck(schedule: Schedule, ranks: Sequence[_Rank]) -> ScheduleError:
    """The error for a schedule that came to a standstill, at the first wire operation that never ended."""
    rank = next(rank for rank in ranks if min(rank.sent, rank.received) < len(rank.wire))
    number = min(rank.sent, rank.received)
    on_wire = [index for index, op in enumerate(rank.program) if not isinstance(op, Compute)]
    op = rank.wire[number]
    if isinstance(op, Collective):
        why = f"{op.kind} waits for ranks {[other.number for other in ranks if not other.at_collective]}"
    elif number == rank.sent:
        why = f"{op.send} never leaves for rank {op.to}: {_next_on_wire(ranks[op.to], receiving=True)}"
    else:
        why = f"{op.recv} never comes from rank {op.frm}: {_next_on_wire(ranks[op.frm], receiving=False)}"
    return ScheduleError(
        f"{schedule.op} cannot finish: rank {rank.number}: {why}", schedule, rank.number, on_wire[number]
    )


def _next_on_wire(rank: _Rank, *, receiving: bool) -> str:
    """What ``rank`` would receive (or send) next."""
    index = rank.received if receiving else rank.sent
    if index == len(rank.wire):
        posted = "has posted nothing more" if rank.finished else f"stands before {rank.program[rank.next_op]}"
        return f"rank {rank.number} {posted}"
    op = rank.wire[index]
    if isinstance(op, Collective):
        return f"rank {rank.number} is at {op.kind}"
    if receiving:
        return f"rank {rank.number} next receives {op.recv} from rank {op.frm}"
    return f"rank {rank.number} next sends {op.send} to rank {op.to}"
