"""Which schedule a call should run: every candidate is replayed on a machine, and the fastest is taken.

The candidates are what the operators can run: the backend's collective, the ideal bytes with nothing overlapped (off),
data slicing, and the decomposed patterns with every useful number of splits, over nodes in either order of rounds; and
where rows are few, the same with pieces cut along features, if the operator can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

from .candidate import Candidate, families, plain
from .cut import Cut, cuts_of, schedule
from .drift import slowed
from .machine import Machine
from .overlap import MODES, Overlap
from .schedule import Schedule
from .simulate import simulate
from .uncollected import uncollected

Sizes = tuple[tuple[str, int | tuple[int, ...]], ...]

_WORSE = 0.02  # with as much more than the best before it, no larger number of parts is tried
_TIE = 0.01  # candidates as close as this are taken as equal, since no prediction is better
_NEAR = 0.02  # and as close as this, the one that is steadier is taken
_SLOWER = 1.15  # times as long a transfer takes, to tell which that is
_MOST_MESSAGES = 1500  # replayed for one call, some 15 us each: more parts are tried as long as this lasts
_SURE = 0.05  # by as much, layers one after the other must be faster: less of it was not found again on a wire
ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Plan:
    """What :func:`plan` found for one call.

    Args:
        op: as it was asked for.
        flow: of the operator.
        rows: of each rank's piece, as planned.
        row_bytes: of a row, by letter of the piece, as the taken candidate moves it.
        tensors: how many move side by side.
        candidates: the one that is taken, then all others by predicted seconds; those that could not be taken are left
            out where that was plain without simulating them.
        compute_s: the kernels of a rank, unsplit, with nothing moved.
        wire_s: the least that the busiest wire has to carry, at its fastest rate, without latencies and after a burst.
        code: "planned", "plain" where nothing overlapped is predicted to be as fast, "only" where one candidate was
            asked for, or "one_rank".
        reason: the same as a sentence.
        features: of each rank's piece, where pieces may be cut along features.
        feature_bytes: of a feature, by letter of the piece.
        layers: the plan of each layer of the call, where they might be run one after the other instead.
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
    features: tuple[int, ...] = ()
    feature_bytes: tuple[tuple[str, int], ...] = ()
    layers: tuple[Plan, ...] = ()

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

    def schedules(self) -> tuple[Schedule, ...]:
        """What is taken: one schedule, or that of each layer, which run one after the other."""
        return tuple(layer.schedule() for layer in self.layers) if self.choice.mode == "layers" else (self.schedule(),)

    def schedule(self) -> Schedule:
        """The schedule that is taken; ValueError where each layer has one of its own."""
        if self.choice.mode == "layers":
            raise ValueError(f"{self.op} runs layer by layer, each with a schedule of its own: schedules()")
        turned = self.choice.along == "features"
        pieces, nbytes = (self.features, self.feature_bytes) if turned else (self.rows, self.row_bytes)
        return schedule(self.flow, pieces, nbytes, self.tensors, self.choice)

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
        ValueError: an operator, size or dtype that is not known, a size that is no whole number, no ranks, or a machine
            without what it needs.
        TypeError: something else in place of the machine or the overlap.
    """
    if not isinstance(machine, Machine) or not isinstance(overlap, Overlap):
        raise TypeError(f"{op}: a Machine and an Overlap are needed, not {machine!r} and {overlap!r}")
    if not (ranks is None or isinstance(ranks, int)):
        raise ValueError(f"{op}: ranks must be a whole number, not {ranks!r}")
    count = sum(machine.nodes) or len(machine.links) if ranks is None else ranks
    sizes = tuple(sorted((name, _frozen(op, name, value)) for name, value in shape.items()))
    return _plan(op, sizes, machine, count, dtype, overlap)


def _frozen(op: str, name: str, value: object) -> int | tuple[int, ...]:
    """A size, which is a whole number or a sequence of such."""
    if isinstance(value, int):
        return value
    if isinstance(value, Sequence) and all(isinstance(each, int) for each in value):
        return tuple(value)
    raise ValueError(f"{op}: {name} must be a whole number, not {value!r}")


@lru_cache(maxsize=1024)
def _plan(op: str, sizes: Sizes, machine: Machine, ranks: int, dtype: str, overlap: Overlap) -> Plan:
    shape = dict(sizes)
    total = shape.get("rows")
    if not isinstance(total, int) or total < 0:
        raise ValueError(f"{op}: shape needs 'rows', a whole number of 0 or more, not {total!r}")
    if ranks < 1:
        raise ValueError(
            f"{op}: ranks must be given for a machine that names neither nodes nor links, 1 or more, not {ranks}"
        )
    if dtype not in ITEMSIZE:
        raise ValueError(f"{op}: dtype must be one of {', '.join(ITEMSIZE)}, not {dtype!r}")
    machine.check_ranks(ranks)
    itemsizes = ITEMSIZE[dtype], max(ITEMSIZE[dtype], ITEMSIZE[overlap.accumulate_dtype])
    with uncollected():  # replays leave no garbage
        return _Planner(op, cuts_of(op, shape, total, ranks, machine, itemsizes), overlap).plan()


class _Planner:
    """One call on a machine, with pieces cut in one way or in several."""

    def __init__(self, op: str, cuts: Sequence[Cut], overlap: Overlap, modes: Sequence[str] = MODES) -> None:
        self.op, self.cuts, self.overlap, self.modes = op, cuts, overlap, modes
        self.compute_s = cuts[0].compute_s()
        self.wire_s = min(cut.wire_s() for cut in cuts)

    def plan(self) -> Plan:
        """Simulates what could be taken, and takes the steadiest and simplest of those that are about as fast."""
        rows, features = self.cuts[0], self.cuts[-1]
        search = _Search(max(self.compute_s, self.wire_s))
        for cut in self.cuts:
            each = plain(self.overlap, len(rows.pieces), cut.along)
            search.found += (self.simulated(cut, candidate) for candidate in each if candidate.mode in self.modes)
        for cut in self.cuts[::-1]:  # where rows are few, features are the faster as a rule
            if not search.settled:
                self.explore_all(cut, search)
        choice, found, layers = self.steadier(search), search.found, self.layers(search)
        if layers:
            each = "; ".join(str(layer.choice) for layer in layers)
            found.append(Candidate("layers", each, 1, seconds=sum(layer.predicted_s for layer in layers)))
            choice = found[-1] if found[-1].seconds * (1 + _SURE) < choice.seconds else choice
        choice = self.worth(choice, found)
        others = sorted((each for each in found if each is not choice), key=lambda each: (each.seconds, each))
        took = f"{choice} is predicted to take {choice.seconds * 1e3:.3f} ms"
        code, reason = reason_of(choice, others, len(rows.pieces), took, lambda rival, ms: f"{rival} {ms}")
        by_features = (features.pieces, features.row_bytes(choice)) if len(self.cuts) > 1 else ((), ())
        return Plan(
            self.op, rows.work.flow, rows.pieces, rows.row_bytes(choice), rows.work.tensors, (choice, *others),
            self.compute_s, self.wire_s, code, reason, *by_features, layers,
        )  # fmt: skip

    def steadier(self, search: _Search) -> Candidate:
        """What is taken, or the fastest of the others that overlap, where that is about as fast and a slower wire slows
        it less.

        [Note: no machine stays as it is] The balance between kernels and wire moves by a tenth within seconds where
        others use the machine too. Of two candidates that are as fast as it was measured, one may be held up by the
        wire when kernels run faster, while the other still has kernels to hide it behind.
        """
        taken = search.taken
        others = [each for each in search.found if each.overlaps and each is not taken]
        rival = min(others, key=lambda each: each.seconds, default=taken)
        if not taken.overlaps or rival is taken or rival.seconds > taken.seconds * (1 + _NEAR):
            return taken
        slow = {cut.along: replace(cut, machine=slowed(cut.machine, _SLOWER, _SLOWER)) for cut in self.cuts}
        taken_s, rival_s = (self.simulated(slow[each.along], each).seconds for each in (taken, rival))
        return rival if rival.seconds + rival_s < (taken.seconds + taken_s) * (1 - _TIE) else taken

    def worth(self, choice: Candidate, found: Sequence[Candidate]) -> Candidate:
        """The choice, or what overlaps nothing if less is gained than one message costs, which varies as much."""
        on = self.cuts[0].machine
        best = min((each for each in found if not each.overlaps), key=lambda each: each.seconds, default=choice)
        return best if choice.overlaps and best.seconds - choice.seconds < on.post_s + on.notice_s else choice

    def layers(self, search: _Search) -> tuple[Plan, ...]:
        """Plans of the layers one after the other, where that could be faster; ranks wait for each other in between."""
        asked = self.overlap.mode != "auto" or self.overlap.pattern != "direct" or self.overlap.splits
        if asked or search.settled or not self.cuts[0].layers:
            return ()
        # not the backend's own collectives: measured beside others they take longest over what a plan says
        modes = [mode for mode in MODES if mode != "collective"]
        layers = [_Planner(cut.work.flow, [cut], self.overlap, modes) for cut in self.cuts[0].layers]
        least_s = sum(layer.least_s() for layer in layers)
        return tuple(layer.plan() for layer in layers) if least_s * (1 + _SURE) < search.taken.seconds else ()

    def least_s(self) -> float:
        """Seconds below which no schedule comes: kernels are slower while the wire is busy, or wait for it."""
        contention = self.cuts[0].machine.contention
        return max(self.compute_s + self.wire_s * contention / (1 + contention), self.wire_s)

    def simulated(self, cut: Cut, candidate: Candidate) -> Candidate:
        """The candidate with what the slowest rank takes."""
        return candidate._replace(seconds=simulate(cut.schedule(candidate), cut.machine, spans=False).makespan_s)

    def explore_all(self, cut: Cut, search: _Search) -> None:
        """The candidate of each family that makes no parts, and then more parts, of the fastest family first."""
        least, messages = cache(partial(cut.least_s, compute_s=self.compute_s)), cut.messages()
        known = [each for each in families(self.overlap, cut.pieces, cut.orders(self.overlap), cut.along) if each]
        for family in known:
            if family[0].splits == 1:
                self.explore(cut, family[:1], search, least, messages)
        for family in sorted(known, key=lambda each: min(search.seconds_by_parts(each[0]).values(), default=0.0)):
            self.explore(cut, family, search, least, messages)

    def explore(
        self,
        cut: Cut,
        family: Sequence[Candidate],
        search: _Search,
        least: Callable[[int], float],
        messages: int,
    ) -> None:
        """Simulates more and more parts, as long as more could be taken; ``least`` seconds are needed for so many, and
        one makes so many ``messages``.

        Each part more costs a message and a kernel call, so after one that is clearly worse than one before it none is
        better. And twice as many save half of what the last ones saved: what the last two numbers of parts differ by
        is the most that all larger ones can save.
        """
        on = cut.machine
        # where small transfers were measured to go at a rate of their own, no number of parts tells of another
        steady = not any(link.sizes for link in (on.link, *on.links, *([on.uplink] if on.uplink else [])))
        for at, each in enumerate(family):
            by_parts = search.seconds_by_parts(each)
            if each.splits in by_parts:
                continue
            floor_s, earlier = min(least(more.splits) for more in family[at:]), [*by_parts.values()]
            if steady and len(earlier) > 1:
                floor_s = max(floor_s, 2 * earlier[-1] - earlier[-2])
            if not search.wants(each, floor_s) or not search.affords(each.splits, messages):
                return
            search.found.append(self.simulated(cut, each))
            if earlier and search.found[-1].seconds > (1 + _WORSE) * min(earlier):
                return


class _Search:
    """What has been simulated for one call, and whether more of it could matter."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s  # no candidate takes less
        self._skipped_s = math.inf  # nor one of those that were not simulated
        self._messages = 0
        self.found: list[Candidate] = []

    def seconds_by_parts(self, candidate: Candidate) -> dict[int, float]:
        """Of those that differ from a candidate in their number of parts alone, what overlaps nothing among them."""
        return {each.splits: each.seconds for each in self.found if each.family == candidate.family}

    @property
    def taken(self) -> Candidate:
        """The simplest of those that are as fast as the fastest can be."""
        return simplest(self.found, self._skipped_s)

    @property
    def settled(self) -> bool:
        """Whether one is as fast as any can be."""
        return any(each.seconds <= self._least_s * (1 + _TIE) for each in self.found)

    def affords(self, parts: int, messages: int) -> bool:
        """Whether a candidate is to be replayed that makes so many parts of what is else so many messages; if so, they
        are counted. One that makes no more parts always is."""
        if parts > 1 and self._messages + parts * messages > _MOST_MESSAGES:
            return False
        self._messages += parts * messages
        return True

    def wants(self, candidate: Candidate, floor_s: float) -> bool:
        """Whether a candidate that takes ``floor_s`` or more could be taken instead; if not, it is not simulated."""
        if len(self.found) < 2:  # of what was asked for, the best and the runner-up
            return True
        taken, floor_s = self.taken, max(self._least_s, floor_s)
        if candidate.simplicity < taken.simplicity:
            return floor_s <= min(each.seconds for each in self.found) * (1 + _TIE)
        if floor_s * (1 + _TIE) < taken.seconds:
            return True
        self._skipped_s = min(self._skipped_s, floor_s)
        return False


def simplest(found: Sequence[Candidate], skipped_s: float = math.inf) -> Candidate:
    """The simplest of those that are as fast as the fastest, or as one that was skipped can be."""
    best_s = min(skipped_s, *(each.seconds for each in found))
    near = (each for each in found if each.seconds <= best_s * (1 + _TIE))
    return min(near, key=lambda each: each.simplicity)


def reason_of(
    choice: Candidate, others: Sequence[Candidate], ranks: int, took: str, against: Callable[[Candidate, str], str]
) -> tuple[str, str]:
    """Code and sentence of a choice; ``took`` says what it takes, ``against`` what a rival does, and how long."""
    if ranks == 1:
        return "one_rank", "one rank has nothing to move"
    if not others:
        return "only", f"{took}; nothing else was to be tried"
    rival = next((each for each in others if each.overlaps != choice.overlaps), None)
    code = "planned" if choice.overlaps else "plain"
    if rival is None and not choice.overlaps:
        return code, f"{took}, which is all but the least that any schedule takes"
    rival = rival or others[0]
    return code, f"{took}, and {against(rival, f'{rival.seconds * 1e3:.3f} ms')}"
