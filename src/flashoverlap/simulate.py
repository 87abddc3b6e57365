"""Replays a schedule on a machine, event by event, and returns when everything happened.

It implements the sentence of :mod:`flashoverlap.schedule`, with these times:

* A transfer starts when both ranks have posted it, the sender's earlier sends have left and the receiver's earlier
  receives have come (up to ``ports`` in flight), and what it hands on has arrived. It holds both ports for
  ``latency_s + bytes / bytes_per_s``, so every message pays its latency; less what the wire passes in a burst after a
  pause, longer while others of its node share the uplink with it. It has come ``notice_s`` after it has left the wire.
* A collective starts when every rank has posted it and has nothing else in flight, and ends for all at once.
* A program ends when its last operation is done and its last transfer, sent or received, is over.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from operator import attrgetter

from .alike import alike_after
from .bursts import Bursts
from .costs import ComputeCosts, collective_cost
from .machine import Machine
from .schedule import Collective, Compute, Exchange, Schedule
from .simulated_rank import SimulatedRank
from .standstill import Standing, check_ranks, standstill
from .trace import Span, Totals, Trace
from .uplinks import Crossing, Uplinks


def simulate(schedule: Schedule, machine: Machine, *, spans: bool = True) -> Trace:
    """Replays ``schedule`` on ``machine``.

    Args:
        spans: whether to keep every span. Without them the trace has only totals, which is faster and smaller: ranks
            that are alike are then replayed once ([Note: ranks alike] in :mod:`flashoverlap.alike`).

    Raises:
        ScheduleError: the schedule cannot finish, names a rank that is not there, or a buffer without a size.
        ValueError: the schedule needs a kernel that the machine does not have, or the machine has other ranks.
    """
    machine.check_ranks(schedule.ranks)
    period = schedule.ranks if spans else alike_after(schedule, machine)
    if period < schedule.ranks:
        return _Replay(schedule, machine, False, period).run()
    check_ranks(schedule)
    return _Replay(schedule, machine, spans, schedule.ranks).run()


Handler = Callable[[SimulatedRank, int], None]


class _Replay:
    """The clock, its agenda, and what happens at each event, on the first ``period`` ranks that stand for all."""

    def __init__(self, schedule: Schedule, machine: Machine, keep_spans: bool, period: int) -> None:
        self.schedule, self.machine, self.ports, self.period = schedule, machine, machine.ports, period
        self.contention, self.notice_s = machine.contention, machine.notice_s
        self.issue_s, self.post_s = machine.issue_s, machine.issue_s + machine.post_s
        self.ranks = [SimulatedRank(number, schedule.programs[number]) for number in range(period)]
        self.spans: list[Span] | None = [] if keep_spans else None
        self.now = 0.0
        self.joined = 0  # ranks that have joined the next collective
        # [Note: agenda by time] Ranks of a regular schedule act at the same times, so events are kept in one list a
        # time and only the times in a heap: it stays short, and events of one time run in the order of their making.
        self.times: list[float] = []
        self.agenda: dict[float, list[tuple[Handler, SimulatedRank, int]]] = {}
        self.costs = ComputeCosts(schedule, machine)
        self.nbytes: dict[str, int] = {}
        self.transfer_costs: dict[tuple[int, int, int], float] = {}
        links = machine.links or (machine.link,)
        kinds = {link: number for number, link in enumerate(links)}
        self.wire_of = [kinds[link] for link in machine.links] or [0] * schedule.ranks
        self.node_of = machine.node_of
        self.uplinks = Uplinks(machine, period) if machine.node_of else None
        self.on_resume, self.on_arrival, self.on_notice = self._resume, self._arrival, self._notice  # bound once
        self.bursts = Bursts(machine, period) if any(link.burst_bytes for link in links) else None

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
                if self.period < self.schedule.ranks:
                    return _Replay(self.schedule, self.machine, False, self.schedule.ranks).run()
                standing = [Standing(r.next_op, r.wire, r.sent, r.received, r.at_collective) for r in self.ranks]
                raise standstill(self.schedule, standing)
        return self._trace()

    def _at(self, time: float, handler: Handler, rank: SimulatedRank, argument: int) -> None:
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
        return Trace(tuple(totals * (self.schedule.ranks // self.period if totals else 1)), tuple(spans))

    # --- the program --------------------------------------------------------------------------------------------------

    def _resume(self, rank: SimulatedRank, version: int) -> None:
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

    def _issue(self, rank: SimulatedRank) -> None:
        """Issues operations until one takes time, or has to wait."""
        program, now = rank.program, self.now
        while rank.next_op < len(program):
            op = program[rank.next_op]
            if not rank.issued:
                cost_s = self.issue_s if isinstance(op, Compute) else self.post_s
                if cost_s:
                    rank.issued = True
                    self._at(now + cost_s, self.on_resume, rank, rank.version)
                    return
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

    def _is_read(self, rank: SimulatedRank, op: Compute) -> bool:
        """Whether all that ``op`` reads is there; if not, notes what it waits for."""
        if rank.unread is None:
            rank.unread = iter(op.reads + op.adds if op.adds else op.reads)
        latest, arrived = rank.latest, rank.arrived
        for name in rank.unread:
            index = latest.get(name)
            if index is not None and not arrived[index]:
                rank.waits_for = index
                return False
        rank.unread = None
        return True

    def _compute(self, rank: SimulatedRank, op: Compute) -> bool:
        """Starts ``op``; False if it takes no time."""
        seconds = self.costs.seconds(op)
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

    def _unblock(self, rank: SimulatedRank, name: str, now: float) -> None:
        """Ends a wait for buffer ``name``."""
        rank.blocked_s += now - rank.started_s
        if self.spans is not None and now > rank.started_s:
            self.spans.append(Span(rank.number, "blocked", name, rank.started_s, now))

    # --- the wire -----------------------------------------------------------------------------------------------------

    def _post(self, rank: SimulatedRank, op: Exchange | Collective) -> None:
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
            self._send(self.ranks[op.frm % self.period])

    def _send(self, rank: SimulatedRank) -> None:
        """Starts the next transfers out of ``rank``, as many as may leave now."""
        while rank.sent < len(rank.wire) and rank.leaving < self.ports:
            op = rank.wire[rank.sent]
            if not isinstance(op, Exchange):
                self._join(rank)
                return
            other = self.ranks[op.to % self.period]
            index = other.received
            if index == len(other.wire) or other.arriving == self.ports:
                return
            match = other.wire[index]
            if not isinstance(match, Exchange) or match.frm % self.period != rank.number:
                return
            if rank.needs:
                need = rank.needs.get(rank.sent)
                if need is not None:
                    if not rank.arrived[need]:
                        return
                    del rank.needs[rank.sent]
            self._start(rank, op, other, match)

    def _start(self, rank: SimulatedRank, op: Exchange, other: SimulatedRank, match: Exchange) -> None:
        """Starts the transfer of ``op.send`` from ``rank`` to ``match.recv`` on rank ``other``."""
        index = other.received
        rank.sent += 1
        rank.leaving += 1
        other.received += 1
        other.arriving += 1
        if self.uplinks is not None and self.node_of[rank.number] != self.node_of[op.to]:
            place = other.number, index
            crossing = Crossing(rank.number, op.to, place, op.send, match.recv, self._bytes(op.send), self.now)
            if self.uplinks.enter(crossing):
                self._at(self.now, self._repace, rank, 0)
        else:
            end = self.now + self._transfer_s(rank, op)
            self._at(end, self.on_arrival, other, index)
            self._transferred(rank, op.send, other, match.recv, self.now, end)
        if self.contention:
            if rank.slowness == 1.0:
                self._rescale(rank)
            if other.slowness == 1.0:
                self._rescale(other)
        if other.arriving < self.ports:
            self._at(self.now, self._receive, other, 0)

    def _transferred(
        self, rank: SimulatedRank, send: str, other: SimulatedRank, recv: str, start_s: float, end_s: float
    ) -> None:
        if self.spans is not None:
            nbytes = self._bytes(send)
            self.spans.append(Span(rank.number, "send", send, start_s, end_s, nbytes))
            self.spans.append(Span(other.number, "recv", recv, start_s, end_s, nbytes))

    def _bytes(self, name: str) -> int:
        """Of a buffer, whose size is looked up once."""
        nbytes = self.nbytes.get(name)
        if nbytes is None:
            nbytes = self.nbytes[name] = self.schedule.size(name).bytes
        return nbytes

    def _transfer_s(self, rank: SimulatedRank, op: Exchange) -> float:
        """Seconds of a transfer inside a node."""
        nbytes = self._bytes(op.send)
        key = (nbytes, self.wire_of[rank.number], self.wire_of[op.to])
        seconds = self.transfer_costs.get(key)
        if seconds is None:
            seconds = self.transfer_costs[key] = self.machine.transfer_s(nbytes, rank.number, op.to)
        if self.bursts is not None:
            gained_s = self.bursts.gained_s(rank.number, nbytes, seconds, self.now)
            if key[1] != key[2]:  # what the sender's wire lets through the receiver's still has to take
                gained_s = min(gained_s, seconds - self.machine.link_of(op.to).seconds(nbytes))
            seconds -= gained_s
        return seconds

    def _cross(self, rank: SimulatedRank, index: int) -> None:
        """Ends a transfer between nodes, unless it has come to end at another time."""
        assert self.uplinks is not None
        crossing, changed = self.uplinks.leave((rank.number, index), self.now)
        if changed:
            self._at(self.now, self._repace, rank, 0)
        if crossing is not None:
            sender, begin = self.ranks[crossing.sender], crossing.start_s
            self._transferred(sender, crossing.send, rank, crossing.recv, begin, self.now)
            self._arrival(rank, index)

    def _repace(self, _: SimulatedRank, __: int) -> None:
        """Has each transfer between nodes end when it does by now."""
        for crossing in self.uplinks.repaced(self.now) if self.uplinks else ():
            number, index = crossing.place
            self._at(crossing.ends_s, self._cross, self.ranks[number], index)

    def _receive(self, rank: SimulatedRank, _: int = 0) -> None:
        """Starts the next transfer into ``rank``, if its sender may send it now."""
        if rank.received < len(rank.wire):
            op = rank.wire[rank.received]
            if isinstance(op, Exchange):
                self._send(self.ranks[op.frm % self.period])
            else:
                self._join(rank)

    def _arrival(self, rank: SimulatedRank, index: int) -> None:
        """Ends the transfer that is number ``index`` on the wire of its receiver."""
        op = rank.wire[index]
        assert isinstance(op, Exchange)
        sender = self.ranks[op.frm % self.period]
        sender.leaving -= 1
        rank.arriving -= 1
        self._send(sender)
        self._receive(rank)
        if self.contention:
            if not (sender.leaving or sender.arriving):
                self._rescale(sender)
            if not (rank.leaving or rank.arriving):
                self._rescale(rank)
        if self.notice_s:
            self._at(self.now + self.notice_s, self.on_notice, rank, index)
        else:
            self._notice(rank, index)

    def _notice(self, rank: SimulatedRank, index: int) -> None:
        """Has both ranks know that the transfer is over."""
        op = rank.wire[index]
        assert isinstance(op, Exchange)
        rank.arrived[index] = 1
        rank.ended_s = self.ranks[op.frm % self.period].ended_s = self.now
        if rank.needs:
            self._send(rank)
        if rank.waits_for == index:
            rank.waits_for = -1
            self._unblock(rank, op.recv, self.now)
            self._issue(rank)

    def _rescale(self, rank: SimulatedRank) -> None:
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

    def _join(self, rank: SimulatedRank) -> None:
        """Lets ``rank`` join the collective that is next on its wire, once its earlier transfers are over."""
        if rank.sent != rank.received or rank.leaving or rank.arriving or rank.at_collective:
            return
        rank.at_collective = True
        self.joined += 1
        if self.joined < len(self.ranks):
            return
        self.joined = 0
        ops = [other.wire[other.sent] for other in self.ranks]
        collectives = [op for op in ops if isinstance(op, Collective)]
        seconds, moved = collective_cost(collectives, self.schedule.ranks, self.schedule, self.machine)
        if self.bursts is not None:
            gains = zip(self.ranks, moved, strict=True)
            seconds -= min(self.bursts.gained_s(other.number, each, seconds, self.now) for other, each in gains)
        for other, nbytes in zip(self.ranks, moved, strict=True):
            other.leaving = other.arriving = self.ports
            if self.contention:
                self._rescale(other)
            if self.spans is not None:
                kind, end = collectives[0].kind, self.now + seconds
                self.spans += (Span(other.number, track, kind, self.now, end, nbytes) for track in ("send", "recv"))
        self._at(self.now + seconds + self.notice_s, self._part, rank, 0)

    def _part(self, _: SimulatedRank, __: int) -> None:
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


def _compute_span(rank: SimulatedRank, op: Compute, end_s: float) -> Span:
    return Span(rank.number, "compute", f"{op.kernel or 'add'} {','.join(op.writes)}", rank.started_s, end_s)
