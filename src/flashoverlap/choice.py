"""Which schedule a call takes: what the caller asked for, and a rule of thumb for what was left open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .flow import flow_of
from .overlap import Overlap


class Choice(NamedTuple):
    """The schedule that a call takes: its mode, pattern and splits, and why."""

    mode: str
    pattern: str
    splits: int
    code: str
    reason: str

    @property
    def detail(self) -> str:
        return f"{self.pattern} x{self.splits}" if self.mode in ("flash", "slice") else ""


_FEWEST_ROWS = 256  # a matmul of fewer rows loses efficiency
_MOST_SPLITS = 8
_SLICES = 4


def choose(overlap: Overlap, op: str, rows: Sequence[int]) -> Choice:
    """What a call with pieces of these rows runs; the same on every rank, since it depends on what was agreed."""
    if overlap.mode == "off":
        return Choice("off", "sliced", 1, "asked", "nothing is overlapped, as asked")
    if overlap.mode == "collective":
        return Choice("collective", "collective", 1, "asked", "the backend's collective, as asked")
    if overlap.mode == "slice":
        slices, why = _no_more_than_rows(overlap.slices, rows) if overlap.slices else (_SLICES, "as is usual")
        return Choice("slice", "sliced", slices, "asked", f"{slices} slices, {why}")
    if len(rows) == 1:
        return Choice("flash", overlap.pattern, 1, "one_rank", "one rank has nothing to move")
    if overlap.splits:
        splits, why = _no_more_than_rows(overlap.splits, rows)
        return Choice("flash", overlap.pattern, splits, "asked", f"{splits} splits, {why}")
    splits = rule_of_thumb(op, rows)
    return Choice("flash", overlap.pattern, splits, "rule_of_thumb", f"{splits} splits by rule of thumb, not by a plan")


def _no_more_than_rows(asked: int, rows: Sequence[int]) -> tuple[int, str]:
    """Parts of a piece: those asked for, or one a row where there are fewer rows."""
    most = max(1, *rows)
    return (asked, "as asked") if asked <= most else (most, f"one a row, where {asked} were asked for")


def rule_of_thumb(op: str, rows: Sequence[int]) -> int:
    """Splits of a piece: as many as leave each matmul enough rows.

    An operator that communicates on one side only, or gathers what it has summed, pays for its last split alone, so
    many help; where a gather and a scatter hide behind the same kernels, a few close the gap between them, fewer where
    many ranks cut finely already.
    """
    flow = flow_of(op)
    both = flow.reduce == "reduce_scatter" and (flow.gather or flow.extra)
    most = max(2, _MOST_SPLITS // len(rows)) if both else _MOST_SPLITS
    return max(1, min(most, max(rows) // _FEWEST_ROWS))
