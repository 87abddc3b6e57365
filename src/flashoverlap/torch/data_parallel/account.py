"""What a data-parallel model tells the report: one record an exchange kind and step."""

from __future__ import annotations

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
    """

    def __init__(self, site: str, overlap: Overlap, ranks: int) -> None:
        self._site, self._overlap, self._ranks = site, overlap, ranks
        self.mode = "flash" if overlap.mode == "auto" else overlap.mode
        self.pattern = "collective" if self.mode == "collective" else overlap.pattern
        self.overlaps = self.mode in ("flash", "slice")
        """Whether other work goes on while something is in flight."""
        self.decomposed = self.mode == "flash"
        """Whether matmuls are cut along the blocks that travel."""
        self._costs: dict[str, tuple[int, float]] = {}

    def add(self, op: str, outcome: Outcome) -> None:
        """Adds what one exchange cost."""
        moved, blocked_s = self._costs.get(op, (0, 0.0))
        self._costs[op] = moved + outcome.sent_bytes, blocked_s + outcome.blocked_s

    def enter(self) -> None:
        """Enters what has come together as one call."""
        code = "one_rank" if self._ranks == 1 else "rule_of_thumb" if self._overlap.mode == "auto" else "asked"
        detail = self.pattern if self.overlaps else ""
        for op, (moved, blocked_s) in self._costs.items():
            why = _WHY[self._overlap.mode] if self._ranks > 1 else "one rank has nothing to move"
            asked = self._overlap.mode
            REPORT.add(Record(self._site, op, asked, self.mode, code, why, detail, 1, moved, blocked_s))
        self._costs = {}
