"""From what each rank measured to the rows of the result. Pure arithmetic: no torch, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from .options import Options


@dataclass
class Part:
    """What one rank measured of one candidate; lists have an entry a round.

    Args:
        row: the candidate's row.
        detail: what the library says that it ran.
        note: added to the detail.
        seconds: from the barrier's end to the end of the pass.
        other_cpu_s: CPU seconds of all threads but the main one.
        blocked_s: that the program stood waiting; empty where nobody counts.
        sent_bytes: by this rank; None where nobody counts.
        max_abs_error: against the float64 reference; None where nothing is compared.
        complaint: what is wrong with the values, or "".
        peak_bytes: of tensors that were live at once; None where they are not counted.
        first_matmul_s: from the start of a training step to its first matmul; empty where no steps are taken.
        gradients_ready_s: from the last matmul of a step's backward until its gradients are ready.
        predicted_s: what plans say of the pass; None in a round where there were none.
        in_calls_s: what calls of the library took; 0 where the report does not know.
    """

    row: str
    detail: str = ""
    note: str = ""
    seconds: list[float] = field(default_factory=list)
    other_cpu_s: list[float] = field(default_factory=list)
    blocked_s: list[float] = field(default_factory=list)
    sent_bytes: int | None = None
    max_abs_error: float | None = None
    complaint: str = ""
    peak_bytes: int | None = None
    first_matmul_s: list[float] = field(default_factory=list)
    gradients_ready_s: list[float] = field(default_factory=list)
    predicted_s: list[float | None] = field(default_factory=list)
    in_calls_s: list[float] = field(default_factory=list)

    def begin(self) -> None:
        """Forgets what rounds have entered."""
        self.seconds, self.other_cpu_s, self.blocked_s, self.predicted_s, self.in_calls_s = [], [], [], [], []


@dataclass
class Row:
    """A row of the result; None where a number does not apply. The names are those of the JSON file."""

    mode: str
    detail: str
    seconds: float | None = None
    seconds_min: float | None = None
    seconds_max: float | None = None
    predicted_seconds: float | None = None
    exposed_seconds: float | None = None
    blocked_seconds: float | None = None
    wire_cpu_seconds: float | None = None
    communication_reduction: float | None = None
    latency_reduction: float | None = None
    first_matmul_seconds: float | None = None
    gradients_ready_seconds: float | None = None
    wire_bytes: int | None = None
    peak_bytes: int | None = None
    max_abs_error: float | None = None


class Candidate:
    """One candidate over all ranks: ``parts`` by rank."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.row = parts[0].row
        self.rounds = [max(times) for times in zip(*(part.seconds for part in parts), strict=True)]
        self.complaints = [f"rank {rank}: {part.complaint}" for rank, part in enumerate(parts) if part.complaint]

    @property
    def seconds(self) -> float:
        """Median over the rounds of the slowest rank's time."""
        return median(self.rounds)

    @property
    def detail(self) -> str:
        """What was run, and the note."""
        note = self.parts[0].note
        return f"{self.parts[0].detail} ({note})" if note else self.parts[0].detail

    def exposed(self, compute: Candidate) -> float:
        """Median over the rounds of what was added to the computation of the same round."""
        return median(mine - base for mine, base in zip(self.rounds, compute.rounds, strict=True))

    def predicted(self, compute: Candidate) -> float | None:
        """What plans say of the pass, on the rank where that is most, and what compute has outside of calls; None where
        any round went without a plan."""
        planned = [[each for each in part.predicted_s if each is not None] for part in self.parts]
        if any(len(each) < len(self.rounds) for each in planned):
            return None
        outside_s = compute.seconds - max(median(part.in_calls_s) for part in compute.parts)
        return max(map(median, planned)) + max(0.0, outside_s)

    def slowest(self, times: str) -> float | None:
        """The median of the rank where it is longest; None where nobody counts."""
        found = [getattr(part, times) for part in self.parts]
        return max(map(median, found)) if all(found) else None

    def wire_cpu(self, compute: Candidate) -> float:
        """CPU time of the other threads beyond that of compute: the busiest rank's median."""
        pairs = zip(self.parts, compute.parts, strict=True)
        return max(median(mine.other_cpu_s) - median(base.other_cpu_s) for mine, base in pairs)

    def measured(self, compute: Candidate) -> Row:
        """The row, without what compares it with off."""
        names = ("sent_bytes", "peak_bytes", "max_abs_error")
        sent, peaks, errors = [[getattr(part, name) for part in self.parts] for name in names]
        return Row(
            self.row,
            self.detail,
            seconds=self.seconds,
            seconds_min=min(self.rounds),
            seconds_max=max(self.rounds),
            predicted_seconds=self.predicted(compute),
            exposed_seconds=self.exposed(compute),
            blocked_seconds=self.slowest("blocked_s"),
            wire_cpu_seconds=self.wire_cpu(compute),
            first_matmul_seconds=self.slowest("first_matmul_s"),
            gradients_ready_seconds=self.slowest("gradients_ready_s"),
            wire_bytes=None if None in sent else max(sent),
            peak_bytes=None if None in peaks else max(peaks),
            max_abs_error=None if None in errors else max(errors),
        )


@dataclass
class Summary:
    """All rows, what was wrong, and which candidate stood for which row."""

    rows: list[Row]
    complaints: list[str]
    best: dict[str, int]


def summarize(ranks: Sequence[Sequence[Part]]) -> Summary:
    """The rows of a run: for each mode its best candidate with right values; wrong values get no timing.

    Args:
        ranks: what each rank measured, candidates in one order; compute and off are among them.
    """
    found = [Candidate(parts) for parts in zip(*ranks, strict=True)]
    summary = Summary([], [f"{one.row} {one.detail}: {text}" for one in found for text in one.complaints], {})
    compute = next(one for one in found if one.row == "compute")
    for row in dict.fromkeys(one.row for one in found):
        right = [(one.seconds, index) for index, one in enumerate(found) if one.row == row and not one.complaints]
        if right:
            summary.best[row] = min(right)[1]
            summary.rows.append(found[min(right)[1]].measured(compute))
        else:
            errors = [part.max_abs_error for one in found if one.row == row for part in one.parts]
            worst = max((error for error in errors if error is not None), default=None)
            summary.rows.append(Row(row, "wrong values", max_abs_error=worst))
    _compare(summary.rows)
    return summary


def _compare(rows: Iterable[Row]) -> None:
    """Fills in the reductions against off."""
    by_mode = {row.mode: row for row in rows}
    off = by_mode["off"]
    for row in by_mode.values():
        if row.seconds is None or not off.seconds:
            continue
        row.latency_reduction = 1 - row.seconds / off.seconds
        if row.mode != "compute" and off.exposed_seconds and off.exposed_seconds > 0:
            row.communication_reduction = 1 - (row.exposed_seconds or 0.0) / off.exposed_seconds


def as_json(options: Options, rows: Sequence[Row]) -> dict[str, Any]:
    """The result file, schema 1."""
    compute = next(row for row in rows if row.mode == "compute").seconds
    rate, uplink = options.link_bytes_per_s, options.uplink_bytes_per_s
    nodes = {} if uplink is None else {"nodes": options.ranks_of_nodes, "uplink_bytes_per_s": uplink}
    bound = None
    if rate is not None and compute is not None and options.nodes == 1:  # what leaves a node depends on its way
        bound = max(compute, options.ideal_bytes / rate)
    return {
        "schema": 1,
        "case": options.shape.case,
        "ranks": options.ranks,
        "link_bytes_per_s": rate,
        "dtype": options.dtype,
        "pass": options.phase,
        "shape": asdict(options.shape),  # pyright: ignore[reportArgumentType]
        "bound_seconds": bound,
        "rows": [asdict(row) for row in rows],
        **nodes,
    }
