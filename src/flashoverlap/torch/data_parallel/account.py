"""What a data-parallel model tells the report: one record an exchange kind and step, and one of the step as a whole."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from ...overlap import Overlap
from ...report import Record
from ..call import REPORT
from ..execute import Outcome

_WHY = {
    "off": "everything moves after backward and before forward, and nothing is overlapped, as asked",
    "collective": "the backend's collectives after backward and before forward, as asked",
    "slice": "whole gradients and whole weights move behind other layers, as asked",
    "flash": "as asked",
    "auto": "gradients and weights move block by block, by rule of thumb, not by a plan",
}


class Account:
    """How a model's exchanges are overlapped, and what they cost.

    Args:
        site: the model's name.
        overlap: what was asked for.
        ranks: of the group.

    Attributes:
        mode: what is taken: in mode "auto" flash, by rule of thumb, until something else is known.
        pattern: of the exchanges.
        last: kind and seconds of the last step; None where no plan speaks of it.
    """

    def __init__(self, site: str, overlap: Overlap, ranks: int) -> None:
        self.site, self._overlap = site, overlap
        self.mode = "flash" if overlap.mode == "auto" else overlap.mode
        self.pattern = "collective" if self.mode == "collective" else overlap.pattern
        self._code, self._why = "asked", _WHY[overlap.mode]
        if ranks == 1:
            self._code, self._why = "one_rank", "one rank has nothing to move"
        elif overlap.mode == "auto":
            self._code = "rule_of_thumb"
        self._splits = ""
        self._predicted: tuple[float, float] | None = None
        self._costs: dict[str, tuple[int, float]] = {}
        self._seconds = 0.0
        self._parts = 0  # that have been timed since the last step, those of other micro-batches too
        self.last: tuple[Hashable, float] | None = None

    @property
    def overlaps(self) -> bool:
        """Whether other work goes on while something is in flight."""
        return self.mode in ("flash", "slice")

    @property
    def decomposed(self) -> bool:
        """Whether matmuls are cut along the blocks that travel."""
        return self.mode == "flash"

    def take(self, mode: str, code: str, why: str, splits: int = 0) -> None:
        """From the next step on this mode is taken; nothing may be in flight."""
        self.mode, self._code, self._why = mode, code, why
        self._splits = f" x{splits}" if splits else ""

    def predict(self, seconds: tuple[float, float] | None) -> None:
        """What a plan says of each step from the next one on, and of what communication adds to that; or None."""
        self._predicted = seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Within, a step goes on."""
        start_s = time.perf_counter()
        yield
        self.took(start_s)

    def took(self, start_s: float) -> None:
        """A part of the step began then, by time.perf_counter, and ends now."""
        self._seconds += time.perf_counter() - start_s
        self._parts += 1

    def add(self, op: str, outcome: Outcome) -> None:
        """Adds what one exchange cost."""
        moved, blocked_s = self._costs.get(op, (0, 0.0))
        self._costs[op] = moved + outcome.sent_bytes, blocked_s + outcome.blocked_s

    def forget(self) -> None:
        """What has been timed belongs to no step: its gradients stay where they are."""
        self._seconds = 0.0

    def enter(self) -> None:
        """Enters what has come together as one call: also the step as a whole, where a plan speaks of that."""
        asked, detail = self._overlap.mode, self.pattern + self._splits if self.overlaps else ""
        if self._predicted is not None:
            why = f"forward, backward and exchanges as a whole: {self._why}"
            head = Record(self.site, "step", asked, self.mode, self._code, why, detail, 1)
            head.seconds, (head.predicted_s, head.predicted_exposed_s) = self._seconds, self._predicted
            REPORT.add(head)
        self.last = None if self._predicted is None else (self._kind(detail), self._seconds)
        for op, (moved, blocked_s) in self._costs.items():
            REPORT.add(Record(self.site, op, asked, self.mode, self._code, self._why, detail, 1, moved, blocked_s))
        self._costs, self._seconds, self._parts = {}, 0.0, 0

    def _kind(self, detail: str) -> Hashable:
        """What steps have in common that should take equally long."""
        moved = sorted((op, moved) for op, (moved, _) in self._costs.items())
        return id(self), self.mode, detail, self._parts, *moved
