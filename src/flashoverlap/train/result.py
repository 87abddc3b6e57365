"""What a run gave, mode by mode: the numbers of the JSON file and of the table. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..report import Report
from .degrees import Degrees


@dataclass(frozen=True)
class Scale:
    """What turns seconds into rates.

    Args:
        model: what ``--model`` says.
        degrees: over how many ranks the model is trained in which way.
        tokens: of a step.
        flops: floating-point operations that the model asks for in a step.
        peak_flops_per_s: of all ranks together, measured.
    """

    model: str
    degrees: Degrees
    tokens: int
    flops: float
    peak_flops_per_s: float

    def mfu(self, seconds: float) -> float:
        """Model FLOPs utilization of a step."""
        return self.flops / (seconds * self.peak_flops_per_s)


@dataclass
class ModeResult:
    """One mode's steps; lists have an entry a step.

    Args:
        mode: its name.
        detail: with which slices or splits.
        losses: the mean loss of each step.
        seconds: of the slowest rank.
        exposed: those seconds beyond computation alone.
        blocked: that a rank's program stood waiting.
        peak_bytes: of a forward and backward pass, on the rank that needs most; None where it was not measured.
        report: of this rank: the calls of the last step, and the notes of all.
    """

    mode: str
    detail: str = ""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    report: Report = field(default_factory=Report)

    def as_json(self, scale: Scale) -> dict[str, Any]:
        """The mode's entry: medians over its steps."""
        seconds = median(self.seconds)
        return {
            "mode": self.mode,
            "losses": self.losses,
            "step_seconds": seconds,
            "tokens_per_s": scale.tokens / seconds,
            "mfu": scale.mfu(seconds),
            "exposed_seconds": median(self.exposed),
            "blocked_seconds": median(self.blocked),
            "peak_bytes": self.peak_bytes,
        }


def as_json(results: Sequence[ModeResult], scale: Scale) -> dict[str, Any]:
    """The result file, schema 1."""
    modes = [result.as_json(scale) for result in results]
    degrees = scale.degrees
    return {"schema": 1, "model": scale.model, "ranks": degrees.count, "degrees": vars(degrees), "modes": modes}


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference between two runs over all their steps; NaN where a loss is none."""
    differences = [abs(mine - other) / abs(other) for mine, other in zip(losses, reference, strict=True)]
    return max(differences, key=lambda each: float("inf") if each != each else each)
