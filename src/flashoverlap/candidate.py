"""What a call could run: schedules that differ in mode, pattern, number of parts, and in what they are cut along."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .overlap import Overlap

_SLICES = (2, 4, 8)
_SPLITS = (1, 2, 4, 8, 16)
_FEWEST_ROWS = 8  # in a split: fewer are no matmul any more
_MOST_PARTS = 512  # pieces times splits: more messages than that never paid
_MODES = ("off", "collective", "slice", "flash")


class Candidate(NamedTuple):
    """A schedule that a call can run, and what it is predicted to take on the slowest rank.

    ``mode`` is as in :class:`~flashoverlap.overlap.Overlap`, ``nodes`` the number of nodes that rounds are spread over,
    ``along`` what pieces are cut along: "rows", or "features" of the result. Mode "layers" stands for the layers of a
    call one after the other; ``pattern`` then says what each runs.
    """

    mode: str
    pattern: str
    splits: int
    nodes: int = 1
    seconds: float = 0.0
    along: str = "rows"

    def __str__(self) -> str:
        if self.mode == "layers":
            return f"per layer: {self.pattern}"
        return " ".join(filter(None, (self.mode, detail(*self[:4], self.along))))

    @property
    def overlaps(self) -> bool:
        """Whether it hides anything."""
        return self.mode not in ("collective", "off")

    @property
    def family(self) -> tuple[object, ...]:
        """What all numbers of parts have in common."""
        return self.pattern, self.nodes, self.along

    @property
    def simplicity(self) -> tuple[object, ...]:
        """Of candidates that are as fast, the one of which this is the least is taken."""
        return _MODES.index(self.mode), self.along != "rows", self.splits, self.pattern, self.nodes


def detail(mode: str, pattern: str, splits: int, nodes: int, along: str) -> str:
    """A candidate in words, but for its mode."""
    parts = f"{pattern} x{splits}" if mode in ("flash", "slice") else ""
    over = f"over {nodes} nodes" if nodes > 1 and parts else ""
    return " ".join(filter(None, (parts, over, "along features" if along == "features" else "")))


def plain(overlap: Overlap, ranks: int, along: str = "rows") -> Iterable[Candidate]:
    """What overlaps nothing and may be taken."""
    both = overlap.mode == "auto" and ranks > 1
    if along == "rows" and (both or overlap.mode == "collective"):  # how a backend cuts is its own affair
        yield Candidate("collective", "collective", 1)
    if both or overlap.mode == "off":
        yield Candidate("off", "sliced", 1, along=along)


def families(
    overlap: Overlap, rows: Sequence[int], orders: Iterable[tuple[str, int]], along: str = "rows"
) -> Iterable[Sequence[Candidate]]:
    """What overlaps something and may be taken, the fastest first as a rule, so that others need not be simulated:
    sequences that differ in the number of parts alone.

    Args:
        overlap: what was asked for.
        rows: of each piece; its features, where it is cut along them.
        orders: patterns, and over how many nodes their rounds are spread.
        along: "rows" or "features".
    """
    if overlap.mode == "auto" and len(rows) == 1:
        yield [Candidate("flash", overlap.pattern, 1)]
        return
    if overlap.mode in ("flash", "auto"):
        for pattern, nodes in orders:
            parts = _parts(overlap.splits, _SPLITS, rows)
            yield [Candidate("flash", pattern, splits, nodes, along=along) for splits in parts]
    if overlap.mode in ("slice", "auto"):
        counts = _parts(overlap.slices, _SLICES, rows)
        if overlap.mode == "slice" and not counts:  # what was asked for is done, with however few rows
            counts = _parts(_SLICES[0], _SLICES, rows)
        yield [Candidate("slice", "sliced", slices, along=along) for slices in counts]


def _parts(asked: int | None, known: Sequence[int], rows: Sequence[int]) -> Sequence[int]:
    """How many parts of a piece are worth a try: as many as asked for, if there are rows for them."""
    if asked is not None:
        return (min(asked, max(1, *rows)),)
    most = min(max(rows) // _FEWEST_ROWS, _MOST_PARTS // len(rows))
    return [parts for parts in known if parts <= max(1, most)]
