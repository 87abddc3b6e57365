"""Which schedule a call takes: what the caller asked for, and for what was left open a plan, or a rule of thumb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .flow import flow_of
from .machine import Machine
from .overlap import DTYPES, Overlap
from .patterns import split_sizes
from .plan import ITEMSIZE, plan


class Choice(NamedTuple):
    """The schedule that a call takes: its mode, pattern and splits, and why.

    ``nodes`` is the number of nodes that rounds are spread over; ``predicted_s`` and ``predicted_exposed_s`` are what a
    plan says that the call takes and what of it is exposed, None without one.
    """

    mode: str
    pattern: str
    splits: int
    code: str
    reason: str
    nodes: int = 1
    predicted_s: float | None = None
    predicted_exposed_s: float | None = None

    @property
    def detail(self) -> str:
        over = f" over {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.pattern} x{self.splits}{over}" if self.mode in ("flash", "slice") else ""


WORTH_BYTES = 1 << 20  # fewer in a whole call: nothing to gain that a rule of thumb could be sure of
FEWEST_ROWS = 256  # a matmul of fewer rows loses efficiency
_MOST_SPLITS = 8
_SLICES = 4


def choose(
    overlap: Overlap,
    op: str,
    rows: Sequence[int],
    *,
    machine: Machine | None = None,
    sizes: Mapping[str, int | Sequence[int]] | None = None,
    dtype: str = "float32",
    fewest_rows: int = FEWEST_ROWS,
) -> Choice:
    """What a call with pieces of these rows runs; the same on every rank, since it depends on what was agreed.

    Args:
        machine: what it runs on, where that is known: what ``overlap`` leaves open is then planned.
        sizes: of the call but for its rows, as :func:`~flashoverlap.plan.plan` takes them; without them nothing is
            planned.
        dtype: of the tensors.
        fewest_rows: of a split that the rule of thumb makes: with fewer the kernels lose efficiency.
    """
    if sizes is None or len(rows) == 1 or dtype not in DTYPES:
        return _unplanned(overlap, op, rows, fewest_rows)
    if machine is None:
        nbytes = call_bytes(sum(rows), sizes, dtype)
        if overlap.mode == "auto" and not overlap.splits and nbytes < WORTH_BYTES:
            return Choice("off", "sliced", 1, "small", f"{nbytes} bytes are too few to overlap without a plan")
        return _unplanned(overlap, op, rows, fewest_rows)
    shape = {"rows": rows_class(sum(rows), len(rows)), **sizes}
    found = plan(op, shape, machine, ranks=len(rows), dtype=dtype, overlap=overlap)
    mode, pattern, splits, nodes, seconds = found.choice
    open_here = overlap.mode == "auto" or (overlap.mode, overlap.splits, overlap.slices) in _OPEN
    code, reason = (found.code, found.reason) if open_here else _unplanned(overlap, op, rows, fewest_rows)[3:5]
    return Choice(mode, pattern, min(splits, max(1, *rows)), code, reason, nodes, seconds, found.exposed_s)


_OPEN = (("flash", None, None), ("slice", None, None))  # modes whose number of parts is left open


def call_bytes(rows: int, sizes: Mapping[str, int | Sequence[int]], dtype: str) -> int:
    """Bytes of what all ranks together bring into a call, its rows as wide as a shard; of attention what it sums."""
    width = sizes.get("features", sizes.get("out", 0))
    if not width:
        heads, head_dim = (sizes.get(name, 0) for name in ("heads", "head_dim"))
        width = _total(heads) * _total(head_dim)
    return rows * _total(width) * ITEMSIZE[dtype]


def _total(size: int | Sequence[int]) -> int:
    return size if isinstance(size, int) else sum(size)


def rows_class(rows: int, ranks: int) -> int:
    """Rows that a call is planned for, so that calls of nearly as many share a plan: pieces of more than 64 rows are
    rounded to one of 32 steps an octave, which is off by 1.6 % at the most."""
    piece = split_sizes(rows, ranks)[0]
    if piece <= 64:
        return rows
    step = 1 << (piece.bit_length() - 6)
    return (piece + step // 2) // step * step * ranks


def _unplanned(overlap: Overlap, op: str, rows: Sequence[int], fewest_rows: int) -> Choice:
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
    splits = rule_of_thumb(op, rows, fewest_rows)
    return Choice("flash", overlap.pattern, splits, "rule_of_thumb", f"{splits} splits by rule of thumb, not by a plan")


def _no_more_than_rows(asked: int, rows: Sequence[int]) -> tuple[int, str]:
    """Parts of a piece: those asked for, or one a row where there are fewer rows."""
    most = max(1, *rows)
    return (asked, "as asked") if asked <= most else (most, f"one a row, where {asked} were asked for")


def rule_of_thumb(op: str, rows: Sequence[int], fewest_rows: int = FEWEST_ROWS) -> int:
    """Splits of a piece: as many as leave each kernel enough rows.

    An operator that communicates on one side only, or gathers what it has summed, pays for its last split alone, so
    many help; where a gather and a scatter hide behind the same kernels, a few close the gap between them, fewer where
    many ranks cut finely already.
    """
    flow = flow_of(op)
    both = flow.reduce == "reduce_scatter" and (flow.gather or flow.extra)
    most = max(2, _MOST_SPLITS // len(rows)) if both else _MOST_SPLITS
    return max(1, min(most, max(rows) // fewest_rows))
