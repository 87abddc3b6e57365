"""Proof that a schedule is right: runs it symbolically on every rank at once, and holds the results to its flow.

[Note: strictest transport] Exchanges are taken as grouped rounds, as NCCL does them. A rank's next exchange starts when
both halves of its current one are complete; a half is complete once the partner's current exchange is its counterpart;
what is received may be read once both halves are. What runs here runs on one-sided and two-sided transports as well.

[Note: buffer lifetimes] Peak bytes are counted in program order. A buffer lives from the operation that writes it (a
receive: that posts it) to its last read. Inputs live from the start, outputs to the end, and so does all that is sent
or given to a collective, since a program never learns that a send is complete. Weights, and activations that no
operation names, are not counted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from .schedule import COLLECTIVES, Collective, Compute, Exchange, Op, Schedule, ScheduleError
from .spec import Spec, Terms, Value, spec_of


@dataclass(frozen=True)
class Proof:
    """What :func:`verify` proved of a schedule.

    Args:
        op: what the programs compute together.
        exchanges: exchanges of all ranks; each has found its counterparts.
        collectives: whole collectives, each counted once.
        wire_bytes: bytes that each rank sends in exchanges.
        peak_bytes: bytes of the buffers that each rank holds at its fullest ([Note: buffer lifetimes]).
    """

    op: str
    exchanges: int
    collectives: int
    wire_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]


def verify(schedule: Schedule) -> Proof:
    """Proves that every rank of a schedule ends with each output made of exactly its terms, and that nothing hangs.

    Raises:
        ScheduleError: exchanges that do not pair or wait for each other in a circle; a buffer that is read before
            anything fills it, or written while it is in flight or holds a value; an output with a lost, a doubled or a
            foreign term; work whose result nobody uses; an operator that no flow describes. The message names the rank
            and the operation, and shows them in the programs.
    """
    for rank, program in enumerate(schedule.programs):
        for index, op in enumerate(program):
            _check(schedule, rank, index, op)
    terms = Terms()
    spec = spec_of(schedule, terms)
    values = _Machine(schedule, spec, terms).run()
    for rank in range(schedule.ranks):
        for name, expected in spec.outputs[rank].items():
            _check_output(schedule, terms, rank, name, values[rank].get(name), expected)
    for rank in range(schedule.ranks):
        _check_use(schedule, spec, rank)
    return Proof(
        schedule.op,
        sum(isinstance(op, Exchange) for program in schedule.programs for op in program),
        sum(isinstance(op, Collective) for op in schedule.programs[0]) if schedule.programs else 0,
        tuple(schedule.wire_bytes(rank) for rank in range(schedule.ranks)),
        tuple(_peak_bytes(schedule, spec, rank) for rank in range(schedule.ranks)),
    )


# --- what it does -----------------------------------------------------------------------------------------------------


def _reads(op: Op, spec: Spec) -> tuple[str, ...]:
    if isinstance(op, Exchange):
        return (op.send,)
    return op.reads + op.adds + spec.needs.get(op.writes[0], ()) if isinstance(op, Compute) else op.reads


def _writes(op: Op, rank: int) -> tuple[str, ...]:
    """What ``op`` writes; a gather and an all-to-all may leave the rank's own block where it lies."""
    if isinstance(op, Exchange):
        return (op.recv,)
    if isinstance(op, Collective) and op.kind in ("all_gather", "all_to_all"):
        own = op.reads[0 if op.kind == "all_gather" else rank]
        return tuple(name for at, name in enumerate(op.writes) if at != rank or name != own)
    return op.writes


class _Machine:
    """All ranks side by side: each issues its program in order until a Compute waits; exchanges pair up behind it."""

    def __init__(self, schedule: Schedule, spec: Spec, terms: Terms) -> None:
        n = schedule.ranks
        self.schedule, self.spec, self.terms = schedule, spec, terms
        self.values = [dict(inputs) for inputs in spec.inputs]
        self.flying: list[dict[str, int]] = [{} for _ in range(n)]  # to be received, with the operation that posted it
        self.sent: list[set[str]] = [set() for _ in range(n)]
        self.next = [0] * n
        self.waits_for = [""] * n
        self.wire: list[deque[int]] = [deque() for _ in range(n)]  # posted and not yet complete; the first is current
        self.send_done = [False] * n  # halves of the current exchange
        self.received: list[Value | None] = [None] * n

    def run(self) -> list[dict[str, Value]]:
        """The values that every rank ends with."""
        # The order in which ranks are tried changes nothing: no step of one takes from another what it could do.
        moving = deque(range(self.schedule.ranks))
        while moving:
            rank = moving.popleft()
            while self.next[rank] < len(self.schedule.programs[rank]) and self._issue(rank):
                self.next[rank] += 1
            moving.extend(self._transfer(rank))
        self._check_ended()
        return self.values

    def _issue(self, rank: int) -> bool:
        """Issues the next operation of ``rank``; False where that is a Compute which must wait."""
        values, flying = self.values[rank], self.flying[rank]
        if self.waits_for[rank] in flying:
            return False
        index = self.next[rank]
        op = self.schedule.programs[rank][index]
        awaited = [name for name in _reads(op, self.spec) if name not in values]
        for name in awaited:
            if name not in flying or (isinstance(op, Compute) and name not in op.reads + op.adds):
                raise _error(self.schedule, rank, index, f"{op} reads {name}, which nothing has filled")
        if isinstance(op, Compute) and awaited:
            self.waits_for[rank] = max(awaited, key=flying.__getitem__)  # posted last, so it arrives last
            return False
        self._check_writes(rank, index, op)
        if isinstance(op, Compute):
            self._compute(rank, op)
        else:
            self.sent[rank].update(_reads(op, self.spec))
            flying.update(dict.fromkeys(_writes(op, rank), index))
            self.wire[rank].append(index)
        return True

    def _check_writes(self, rank: int, index: int, op: Op) -> None:
        values = self.values[rank]
        for name in _writes(op, rank):
            if name in self.sent[rank] or name in self.flying[rank]:
                raise _error(self.schedule, rank, index, f"{op} overwrites {name}, which is in flight")
            if name in values and not (isinstance(op, Compute) and name in op.adds):
                held = self.terms.text(values[name])
                raise _error(self.schedule, rank, index, f"{op} overwrites {name}, which holds {held}")

    def _compute(self, rank: int, op: Compute) -> None:
        values = self.values[rank]
        reads = [values[name] for name in op.reads]
        if len(op.writes) > 1:
            made = [self.terms(op.kernel, rank, (value,)) for value in reads]
        else:
            sums = [number for name in op.adds for number in values[name]]
            made = [tuple(sorted((*(self.terms(op.kernel, rank, reads) if op.kernel else ()), *sums)))]
        values.update(zip(op.writes, made, strict=True))

    def _current(self, rank: int) -> Exchange | Collective | None:
        op = self.schedule.programs[rank][self.wire[rank][0]] if self.wire[rank] else None
        return None if isinstance(op, Compute) else op

    def _transfer(self, rank: int) -> list[int]:
        """Completes what ``rank`` and its partners have both come to; the ranks that may move on by that."""
        op = self._current(rank)
        if isinstance(op, Collective):
            ops = [self._current(other) for other in range(self.schedule.ranks)]
            return self._collective([op for op in ops if isinstance(op, Collective)])
        if op is None:
            return []
        self._send(rank, op.to)
        self._send(op.frm, rank)
        return [other for other in dict.fromkeys((rank, op.to, op.frm)) if self._complete(other)]

    def _send(self, source: int, target: int) -> None:
        """Completes one half of each of two current exchanges if they are counterparts: [Note: strictest transport]."""
        sends, receives = self._current(source), self._current(target)
        if not isinstance(sends, Exchange) or not isinstance(receives, Exchange):
            return
        if (sends.to, receives.frm) != (target, source) or self.send_done[source] or self.received[target] is not None:
            return  # the later of two exchanges with the same partner must not find the earlier's half
        self._check_sizes(target, receives.recv, source, sends.send)
        self.send_done[source] = True
        self.received[target] = self.values[source][sends.send]

    def _complete(self, rank: int) -> bool:
        op, value = self._current(rank), self.received[rank]
        if not isinstance(op, Exchange) or value is None or not self.send_done[rank]:
            return False
        self._arrive(rank, {op.recv: value})
        self.send_done[rank], self.received[rank] = False, None
        return True

    def _arrive(self, rank: int, values: Mapping[str, Value]) -> None:
        self.wire[rank].popleft()
        self.values[rank].update(values)
        for name in values:
            self.flying[rank].pop(name, None)

    def _check_sizes(self, rank: int, name: str, source: int, given: str) -> None:
        takes, gives = self.schedule.size(name), self.schedule.size(given)
        if takes != gives:
            message = f"{name} takes {takes}, and rank {source} gives {given} of {gives}"
            raise _error(self.schedule, rank, self.wire[rank][0], message)

    def _collective(self, ops: list[Collective]) -> list[int]:
        """Completes a collective that all ranks have come to."""
        if len(ops) < self.schedule.ranks:
            return []
        for rank, op in enumerate(ops):
            if (op.kind, len(op.reads)) != (ops[0].kind, len(ops[0].reads)):
                message = f"rank 0 has come to {ops[0]}, and rank {rank} to {op}"
                raise _error(self.schedule, rank, self.wire[rank][0], message)
        sums = [
            {name: self._sum(rank, name, _sources(ops, rank, at)) for at, name in enumerate(op.writes)}
            for rank, op in enumerate(ops)
        ]
        for rank, values in enumerate(sums):
            self._arrive(rank, values)
        return list(range(len(ops)))

    def _sum(self, rank: int, name: str, sources: list[tuple[int, str]]) -> Value:
        for source, given in sources:
            self._check_sizes(rank, name, source, given)
        return tuple(sorted(number for source, given in sources for number in self.values[source][given]))

    def _check_ended(self) -> None:
        waits: list[tuple[int, int, str]] = []
        for rank, program in enumerate(self.schedule.programs):
            op = self._current(rank)
            if self.next[rank] < len(program):
                waits.append((rank, self.next[rank], f"for {self.waits_for[rank]}"))
            if op is not None:
                waits.append((rank, self.wire[rank][0], self._partners(rank, op)))
        if waits:
            lines = [
                f"rank {rank}: {self.schedule.programs[rank][index]!s:.60} waits {what}" for rank, index, what in waits
            ]
            more = [f"and {len(lines) - 16} more"] if len(lines) > 16 else []
            message = "\n  ".join(["deadlock, no rank can move:", *lines[:16], *more])
            raise ScheduleError(message, self.schedule, *waits[0][:2])

    def _partners(self, rank: int, op: Exchange | Collective) -> str:
        """What the current exchange of ``rank`` still waits for."""
        if isinstance(op, Collective):
            others = [other for other in range(self.schedule.ranks) if not isinstance(self._current(other), Collective)]
            return f"for ranks {others} to come to a collective"
        halves = [] if self.send_done[rank] else [(f"for rank {op.to} to take {op.send}", op.to)]
        halves += [(f"for rank {op.frm} to send {op.recv}", op.frm)] if self.received[rank] is None else []
        return " and ".join(
            f"{what} (on its wire: {self._current(other) or 'nothing'!s:.60})" for what, other in halves
        )


def _sources(ops: list[Collective], rank: int, at: int) -> list[tuple[int, str]]:
    """The ``(rank, buffer)`` whose sum a collective puts into ``rank``'s write number ``at``."""
    kind = ops[0].kind
    if kind == "all_gather":
        return [(at, ops[at].reads[0])]
    if kind == "all_to_all":
        return [(at, ops[at].reads[rank])]
    return [(source, op.reads[at if kind == "all_reduce" else rank]) for source, op in enumerate(ops)]


# --- checks -----------------------------------------------------------------------------------------------------------


def _error(schedule: Schedule, rank: int, index: int, message: str) -> ScheduleError:
    return ScheduleError(f"rank {rank}, operation {index}: {message}", schedule, rank, index)


def _check(schedule: Schedule, rank: int, index: int, op: Op) -> None:
    """Raises ScheduleError for an operation that is wrong by itself."""
    problem = ""
    if isinstance(op, Exchange):
        if not {op.to, op.frm} <= set(range(schedule.ranks)) - {rank}:
            problem = f"{op} must name other ranks below {schedule.ranks}"
        names = (op.send, op.recv)
    else:
        problem = _malformed_compute(op) if isinstance(op, Compute) else _malformed_collective(op, schedule.ranks)
        if not problem and len(set(op.writes)) < len(op.writes):
            problem = f"{op} writes a buffer twice"
        names = op.reads + op.writes + (op.adds if isinstance(op, Compute) else ())
    try:
        rows = {name: schedule.size(name).rows for name in names}
    except ScheduleError as error:
        problem, rows = problem or str(error), {}
    if not problem and isinstance(op, Compute) and op.adds and len({rows[name] for name in op.writes + op.adds}) > 1:
        problem = f"{op} sums unequal rows: {', '.join(f'{name} has {rows[name]}' for name in op.writes + op.adds)}"
    if problem:
        raise _error(schedule, rank, index, problem)


def _malformed_compute(op: Compute) -> str:
    if not op.writes:
        return f"{op} writes nothing"
    if not op.kernel and (op.reads or not op.adds):
        return f"{op} has no kernel, so it must be a sum and read nothing else"
    if len(op.writes) > 1 and (op.adds or len(op.reads) != len(op.writes)):
        return f"{op} writes {len(op.writes)} buffers, so it must read as many and add none"
    return ""


def _malformed_collective(op: Collective, ranks: int) -> str:
    if op.kind not in COLLECTIVES:
        return f"unknown collective {op.kind!r}; known: {', '.join(COLLECTIVES)}"
    each = max(1, len(op.reads))
    shapes = {"all_gather": (1, ranks), "reduce_scatter": (ranks, 1), "all_reduce": (each, each)}
    reads, writes = shapes.get(op.kind, (ranks, ranks))
    if (len(op.reads), len(op.writes)) != (reads, writes):
        return f"{op} must read {reads} and write {writes} buffers on {ranks} ranks"
    return ""


def _check_output(schedule: Schedule, terms: Terms, rank: int, name: str, value: Value | None, expected: Value) -> None:
    if value == expected:
        return
    writes = [at for at, op in enumerate(schedule.programs[rank]) if name in _writes(op, rank)]
    made, wanted = Counter(value or ()), Counter(expected)
    found: list[str] = ["nothing writes it"] if value is None else []
    for word, difference in (("missing", wanted - made), ("extra", made - wanted)):
        lost = sorted(difference.elements())
        if lost:
            more = f" and {len(lost) - 8} more" if len(lost) > 8 else ""
            found.append(f"{word} {', '.join(terms.text((term,)) for term in lost[:8])}{more}")
    index = writes[-1] if writes else len(schedule.programs[rank])
    raise ScheduleError(f"{name} on rank {rank}: {'; '.join(found)}", schedule, rank, index)


def _check_use(schedule: Schedule, spec: Spec, rank: int) -> None:
    idle: dict[str, int] = {}  # written and not read since
    for index, op in enumerate(schedule.programs[rank]):
        for name in _reads(op, spec):
            idle.pop(name, None)
        idle.update(dict.fromkeys(_writes(op, rank), index))
    for name, index in idle.items():
        if name not in spec.outputs[rank]:
            done = "computed" if isinstance(schedule.programs[rank][index], Compute) else "moved"
            raise _error(schedule, rank, index, f"{name} is {done} for nothing: no output, and nobody reads it")


def _peak_bytes(schedule: Schedule, spec: Spec, rank: int) -> int:
    """[Note: buffer lifetimes]"""
    program = schedule.programs[rank]
    end = len(program)
    born = dict.fromkeys(spec.inputs[rank], 0)
    dies = dict.fromkeys(spec.outputs[rank], end)
    for index, op in enumerate(program):
        for name in _writes(op, rank):
            born.setdefault(name, index)
            dies[name] = max(dies.get(name, 0), index)
        for name in _reads(op, spec):
            dies[name] = max(dies.get(name, 0), index if isinstance(op, Compute) else end)
    change = [0] * (end + 2)
    for name, last in dies.items():
        size = schedule.size(name).bytes
        change[born[name]] += size
        change[last + 1] -= size
    held = peak = 0
    for step in change:
        held += step
        peak = max(peak, held)
    return peak
