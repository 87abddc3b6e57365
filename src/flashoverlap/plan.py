"""Which schedule a call should run: every candidate is replayed on a machine, and the fastest is taken.

The candidates are what the operators can run: the backend's collective, the ideal bytes with nothing overlapped (off),
data slicing, and the decomposed patterns with every useful number of splits, over nodes in either order of rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from .all_to_all import all_to_all
from .costs import ComputeCosts
from .flow import ALL_TO_ALLS, flow_of
from .machine import Machine
from .overlap import Overlap
from .patterns import build, split_sizes
from .schedule import Compute, Schedule
from .simulate import simulate
from .wire_bound import least_seconds_in_parts, least_wire_seconds
from .workload import Workload, workload

Sizes = tuple[tuple[str, int | tuple[int, ...]], ...]

_SLICES = (2, 4, 8)
_SPLITS = (1, 2, 4, 8, 16)
_FEWEST_ROWS = 8  # in a split: fewer are no matmul any more
_MOST_PARTS = 512  # pieces times splits: more messages than that never paid
_WHOLE_ROWS = 64  # rows of a piece from which on pieces may be taken as equal, which is off by one row each
_WORSE = 0.02  # with as much more than the best before it, no larger number of parts is tried
_TIE = 0.01  # candidates as close as this are taken as equal, since no prediction is better
ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class Candidate(NamedTuple):
    """A schedule that a call can run, and what it is predicted to take on the slowest rank.

    ``mode`` is as in :class:`~flashoverlap.overlap.Overlap`, ``nodes`` the number of nodes that rounds are spread over.
    """

    mode: str
    pattern: str
    splits: int
    nodes: int = 1
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.mode in ("collective", "off"):
            return self.mode
        over = f" over {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.mode} {self.pattern} x{self.splits}{over}"


_DIRECT = Candidate("flash", "direct", 1)


@dataclass(frozen=True)
class Plan:
    """What :func:`plan` found for one call.

    Args:
        op: as it was asked for.
        flow: of the operator.
        rows: of each rank's piece, as planned.
        candidates: the one that is taken, then all others by predicted seconds; those that could not be taken are left
            out where that was plain without simulating them.
        compute_s: the kernels of a rank, unsplit, with nothing moved.
        wire_s: the least that the busiest wire has to carry, at its fastest rate, without latencies and after a burst.
        code: "planned", "plain" where nothing overlapped is predicted to be as fast, "only" where one candidate was
            asked for, or "one_rank".
        reason: the same as a sentence.
    """

    op: str
    flow: str
    rows: tuple[int, ...]
    row_bytes: tuple[tuple[str, int], ...]
    tensors: int
    candidates: tuple[Candidate, ...]
    compute_s: float
    wire_s: float
    code: str
    reason: str

    @property
    def choice(self) -> Candidate:
        """The candidate that is taken."""
        return self.candidates[0]

    @property
    def runner_up(self) -> Candidate | None:
        """The best of the others."""
        return self.candidates[1] if len(self.candidates) > 1 else None

    @property
    def predicted_s(self) -> float:
        """Seconds that the call is predicted to take."""
        return self.choice.seconds

    @property
    def exposed_s(self) -> float:
        """Seconds that communication is predicted to add to the kernels."""
        return self.predicted_s - self.compute_s

    @property
    def bound_s(self) -> float:
        """No schedule takes less: the longer of the kernels and the busiest wire."""
        return max(self.compute_s, self.wire_s)

    def schedule(self) -> Schedule:
        """The schedule that is taken."""
        return _schedule(self.flow, self.rows, self.row_bytes, self.tensors, self.choice)

    def __str__(self) -> str:
        rows = f"{sum(self.rows)} rows on {len(self.rows)} ranks"
        lines = [
            f"{self.op}, {rows}: {self.choice}, {self.predicted_s * 1e3:.3f} ms",
            f"  {self.reason}",
            f"  bound {self.bound_s * 1e3:.3f} ms (compute {self.compute_s * 1e3:.3f}, wire {self.wire_s * 1e3:.3f}), "
            f"exposed {self.exposed_s * 1e3:.3f} ms",
        ]
        return "\n".join(lines + [f"  {each.seconds * 1e3:12.3f} ms  {each}" for each in self.candidates])


def plan(
    op: str,
    shape: Mapping[str, int | Sequence[int]],
    machine: Machine,
    *,
    ranks: int | None = None,
    dtype: str = "float32",
    overlap: Overlap = Overlap(),
) -> Plan:
    """Plans one call: simulates what it can run on ``machine``, and takes the fastest.

    The same arguments give the same plan, on every rank; it is kept, so that asking again costs microseconds.

    Args:
        op: an operator ("mlp", "mlp backward", "linear_reduce_scatter", ...) or a flow, with outputs left out
            ("column_backward-w").
        shape: "rows" in all, and the sizes of one rank's call (:mod:`flashoverlap.workload` lists them): features, out,
            hidden, gated, heads, head_dim, keys, causal, tokens; "out" of several weights side by side is a sequence.
        machine: its kernels go by their names, and where it has none of a name it is made of ``machine.matmul``.
        ranks: how many; those of the machine's nodes or links unless given.
        dtype: of the tensors.
        overlap: what may be taken: anything in mode "auto", else its mode; splits, slices and pattern as it says, where
            "auto" with pattern "direct" leaves the pattern open.

    Raises:
        ValueError: an operator, size or dtype that is not known, no ranks, or a machine without what it needs.
    """
    count = ranks or sum(machine.nodes) or len(machine.links)
    sizes = tuple(sorted((name, _frozen(value)) for name, value in shape.items()))
    return _plan(op, sizes, machine, count, dtype, overlap)


def _frozen(value: int | Sequence[int]) -> int | tuple[int, ...]:
    return value if isinstance(value, int) else tuple(value)


@lru_cache(maxsize=1024)
def _plan(op: str, sizes: Sizes, machine: Machine, ranks: int, dtype: str, overlap: Overlap) -> Plan:
    shape = dict(sizes)
    total = shape.get("rows")
    if not isinstance(total, int) or total < 0:
        raise ValueError(f"{op}: shape needs 'rows', a whole number of 0 or more, not {total!r}")
    if ranks < 1:
        raise ValueError(f"{op}: ranks must be given for a machine that names neither nodes nor links")
    if dtype not in ITEMSIZE:
        raise ValueError(f"{op}: dtype must be one of {', '.join(ITEMSIZE)}, not {dtype!r}")
    machine.check_ranks(ranks)
    work = workload(op, shape, ranks)
    rows = _pieces(total, ranks)
    on = work.on(machine, sum(rows), ITEMSIZE[dtype])
    return _Planner(op, work, rows, on, dtype, overlap).plan()


def _pieces(total: int, ranks: int) -> tuple[int, ...]:
    """Rows of each piece, taken as equal where that is off by little: ranks are then alike, and quickly simulated."""
    rows = split_sizes(total, ranks)
    return tuple(rows) if rows[0] < _WHOLE_ROWS else (rows[0],) * ranks


class _Planner:
    """One call on a machine that has its kernels."""

    def __init__(
        self, op: str, work: Workload, rows: tuple[int, ...], machine: Machine, dtype: str, overlap: Overlap
    ) -> None:
        self.op, self.work, self.rows, self.machine, self.overlap = op, work, rows, machine, overlap
        itemsize = ITEMSIZE[dtype]
        accumulated = max(itemsize, ITEMSIZE[overlap.accumulate_dtype])
        self.row_bytes = {
            travels: tuple(sorted(work.row_bytes(itemsize, travels).items())) for travels in (itemsize, accumulated)
        }
        self.itemsize, self.accumulated = itemsize, accumulated

    def plan(self) -> Plan:
        """Simulates what could be taken, and takes the simplest of those that are as fast as the fastest."""
        compute_s, wire_s = self.bounds()
        search = _Search(max(compute_s, wire_s))
        search.found += (self.simulated(each) for each in _plain(self.overlap, self.rows))
        if not search.settled:
            direct = self.schedule(_DIRECT)
            least = cache(lambda parts: least_seconds_in_parts(direct, self.machine, parts, compute_s))
            for family in _families(self.overlap, self.rows, self._orders()):
                self.explore(family, search, least)
        choice, found = search.taken, search.found
        others = sorted((each for each in found if each is not choice), key=lambda each: (each.seconds, each))
        code, reason = _reason(choice, others, len(self.rows))
        row_bytes = self.row_bytes[self.travels(choice)]
        flow, tensors = self.work.flow, self.work.tensors
        return Plan(self.op, flow, self.rows, row_bytes, tensors, (choice, *others), compute_s, wire_s, code, reason)

    def _orders(self) -> list[tuple[str, int]]:
        """Patterns, and over how many nodes their rounds are spread, that may hide communication."""
        sizes, pattern = self.machine.nodes, self.overlap.pattern
        orders = [("direct", 1)] if pattern == "direct" else []
        blocks = flow_of(self.work.flow).swap is not None
        if self.machine.uplink is not None and len(set(sizes)) == 1 and 1 < len(sizes) < len(self.rows):
            orders += [("direct", len(sizes))] if orders and not blocks else []
        # an all-to-all sends every block once, and round a ring each as far as it has to go
        if pattern == "ring" or (self.overlap.mode == "auto" and not blocks):
            orders.append(("ring", 1))
        return orders

    def travels(self, candidate: Candidate) -> int:
        """Bytes of a value of a partial sum on the wire: where what is sent is a sum already, that of the sum."""
        return self.accumulated if candidate.pattern in ("ring", "collective") else self.itemsize

    def schedule(self, candidate: Candidate) -> Schedule:
        row_bytes = self.row_bytes[self.travels(candidate)]
        return _schedule(self.work.flow, self.rows, row_bytes, self.work.tensors, candidate)

    def simulated(self, candidate: Candidate) -> Candidate:
        """The candidate with what the slowest rank takes."""
        return candidate._replace(seconds=simulate(self.schedule(candidate), self.machine, spans=False).makespan_s)

    def explore(self, family: Sequence[Candidate], search: _Search, least: Callable[[int], float]) -> None:
        """Simulates more and more parts, as long as more could be taken; ``least`` seconds are needed for so many.

        Each part more costs a message and a kernel call, so after one that is clearly worse than one before it none is
        better. And twice as many save half of what the last ones saved: what the last two numbers of parts differ by
        is the most that all larger ones can save.
        """
        on = self.machine
        # where small transfers were measured to go at a rate of their own, no number of parts tells of another
        steady = not any(link.sizes for link in (on.link, *on.links, *([on.uplink] if on.uplink else [])))
        seconds: list[float] = []
        for at, each in enumerate(family):
            floor_s = min(least(more.splits) for more in family[at:])
            earlier = [other.seconds for other in search.found if other[1:4:2] == each[1:4:2]]  # pattern and nodes
            if steady and len(earlier) > 1:
                floor_s = max(floor_s, 2 * earlier[-1] - earlier[-2])
            if not search.wants(each, floor_s):
                return
            search.found.append(self.simulated(each))
            seconds.append(search.found[-1].seconds)
            if seconds[-1] > (1 + _WORSE) * min(seconds):
                return

    def bounds(self) -> tuple[float, float]:
        """Seconds of the kernels, unsplit, and of the busiest wire at its bandwidth."""
        whole = self.schedule(Candidate("collective", "collective", 1))
        costs = ComputeCosts(whole, self.machine)
        kernels = (op for op in whole.programs[0] if isinstance(op, Compute) and op.kernel)
        return sum(map(costs.kernel_seconds, kernels)), least_wire_seconds(self.schedule(_DIRECT), self.machine)


class _Search:
    """What has been simulated for one call, and whether more of it could matter."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s  # no candidate takes less
        self._skipped_s = math.inf  # nor one of those that were not simulated
        self.found: list[Candidate] = []

    @property
    def taken(self) -> Candidate:
        """The simplest of those that are as fast as the fastest can be."""
        best_s = min(self._skipped_s, *(each.seconds for each in self.found))
        return min((each for each in self.found if each.seconds <= best_s * (1 + _TIE)), key=_simplicity)

    @property
    def settled(self) -> bool:
        """Whether one is as fast as any can be."""
        return any(each.seconds <= self._least_s * (1 + _TIE) for each in self.found)

    def wants(self, candidate: Candidate, floor_s: float) -> bool:
        """Whether a candidate that takes ``floor_s`` or more could be taken instead; if not, it is not simulated."""
        if len(self.found) < 2:  # of what was asked for, the best and the runner-up
            return True
        taken, floor_s = self.taken, max(self._least_s, floor_s)
        if _simplicity(candidate) < _simplicity(taken):
            return floor_s <= min(each.seconds for each in self.found) * (1 + _TIE)
        if floor_s * (1 + _TIE) < taken.seconds:
            return True
        self._skipped_s = min(self._skipped_s, floor_s)
        return False


def _schedule(
    flow: str, rows: tuple[int, ...], row_bytes: tuple[tuple[str, int], ...], tensors: int, candidate: Candidate
) -> Schedule:
    _, pattern, splits, nodes, _ = candidate
    if flow_of(flow).swap is None:
        return build(flow, rows, pattern=pattern, splits=splits, row_bytes=dict(row_bytes), nodes=nodes)
    # where blocks are summed they are the target's rows, else the source's
    summed = ALL_TO_ALLS[flow.partition("-")[0]].reduce
    blocks = [rows] * len(rows) if summed else [[own] * len(rows) for own in rows]
    return all_to_all(blocks, op=flow, pattern=pattern, splits=splits, tensors=tensors, row_bytes=dict(row_bytes))


def _plain(overlap: Overlap, rows: Sequence[int]) -> Iterable[Candidate]:
    """What overlaps nothing and may be taken."""
    both = overlap.mode == "auto" and len(rows) > 1
    if both or overlap.mode == "collective":
        yield Candidate("collective", "collective", 1)
    if both or overlap.mode == "off":
        yield Candidate("off", "sliced", 1)


def _families(
    overlap: Overlap, rows: Sequence[int], orders: Iterable[tuple[str, int]]
) -> Iterable[Sequence[Candidate]]:
    """What overlaps something and may be taken, the fastest first as a rule, so that others need not be simulated:
    sequences that differ in the number of parts alone."""
    if overlap.mode == "auto" and len(rows) == 1:
        yield [Candidate("flash", overlap.pattern, 1)]
        return
    if overlap.mode in ("flash", "auto"):
        for pattern, nodes in orders:
            yield [Candidate("flash", pattern, splits, nodes) for splits in _parts(overlap.splits, _SPLITS, rows)]
    if overlap.mode in ("slice", "auto"):
        counts = _parts(overlap.slices, _SLICES, rows)
        if overlap.mode == "slice" and not counts:  # what was asked for is done, with however few rows
            counts = _parts(_SLICES[0], _SLICES, rows)
        yield [Candidate("slice", "sliced", slices) for slices in counts]


def _simplicity(candidate: Candidate) -> tuple[object, ...]:
    modes = ("collective", "off", "slice", "flash")
    return modes.index(candidate.mode), candidate.splits, candidate.pattern, candidate.nodes


def _parts(asked: int | None, known: Sequence[int], rows: Sequence[int]) -> Sequence[int]:
    """How many parts of a piece are worth a try: as many as asked for, if there are rows for them."""
    if asked is not None:
        return (min(asked, max(1, *rows)),)
    most = min(max(rows) // _FEWEST_ROWS, _MOST_PARTS // len(rows))
    return [parts for parts in known if parts <= max(1, most)]


def _reason(choice: Candidate, others: Sequence[Candidate], ranks: int) -> tuple[str, str]:
    if ranks == 1:
        return "one_rank", "one rank has nothing to move"
    took = f"{choice} is predicted to take {choice.seconds * 1e3:.3f} ms"
    if not others:
        return "only", f"{took}; nothing else was to be tried"
    plain = [each for each in others if each.mode in ("off", "collective")]
    if choice.mode not in ("off", "collective"):
        rival = (plain or others)[0]
        return "planned", f"{took}, and {rival} {rival.seconds * 1e3:.3f} ms"
    rivals = [each for each in others if each not in plain]
    if not rivals:
        return "plain", f"{took}, which is all but the least that any schedule takes"
    return "plain", f"{took}, and {rivals[0]} {rivals[0].seconds * 1e3:.3f} ms"
