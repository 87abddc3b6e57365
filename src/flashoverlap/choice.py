"""Which schedule a call takes: what the caller asked for, and for what was left open a plan, or a rule of thumb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .candidate import detail
from .flow import flow_of
from .machine import Machine
from .overlap import DTYPES, Overlap
from .patterns import split_sizes
from .plan import ITEMSIZE, plan
from .workload import along_features


class Choice(NamedTuple):
    """The schedule that a call takes: its mode, pattern and splits, and why.

    ``nodes`` is the number of nodes that rounds are spread over; ``predicted_s`` and ``predicted_exposed_s`` are what a
    plan says that the call takes and what of it is exposed, None without one. ``along`` is what pieces are cut along:
    "rows", or "features" of the result. ``layers`` are the choices of layers that run one after the other instead.
    """

    mode: str
    pattern: str
    splits: int
    code: str
    reason: str
    nodes: int = 1
    predicted_s: float | None = None
    predicted_exposed_s: float | None = None
    along: str = "rows"
    layers: tuple[Choice, ...] = ()

    @property
    def detail(self) -> str:
        return detail(self.mode, self.pattern, self.splits, self.nodes, self.along)


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
        small = overlap.mode == "auto" and not overlap.splits and nbytes < WORTH_BYTES
        found = _along_more(_NOTHING if small else overlap, op, rows, sizes, fewest_rows)
        why = f"{nbytes} bytes are too few to overlap without a plan"
        return found._replace(code="small", reason=why) if small else found
    shape = {"rows": rows_class(sum(rows), len(rows)), **sizes}
    found = plan(op, shape, machine, ranks=len(rows), dtype=dtype, overlap=overlap)
    mode, pattern, splits, nodes, seconds, along = found.choice
    pieces = pieces_of_features(op, sizes, len(rows)) if along == "features" else rows
    open_here = overlap.mode == "auto" or (overlap.mode, overlap.splits, overlap.slices) in _OPEN
    told = found if open_here else _unplanned(overlap, op, pieces, fewest_rows, along)
    most = max(1, *pieces)
    layers = tuple(
        Choice(*layer.choice[:2], min(layer.choice.splits, most), told.code, told.reason, layer.choice.nodes,
               layer.predicted_s, layer.exposed_s)
        for layer in (found.layers if mode == "layers" else ())
    )  # fmt: skip
    splits = min(splits, most)
    return Choice(mode, pattern, splits, told.code, told.reason, nodes, seconds, found.exposed_s, along, layers)


_NOTHING = Overlap("off")
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


def pieces_of_features(op: str, sizes: Mapping[str, int | Sequence[int]], ranks: int) -> Sequence[int]:
    """Features of each piece where a call is cut along them; none where it cannot be."""
    turned = along_features(op, sizes, 0)
    return split_sizes(turned[0], ranks) if turned else ()


def _along_more(
    overlap: Overlap, op: str, rows: Sequence[int], sizes: Mapping[str, int | Sequence[int]], fewest_rows: int
) -> Choice:
    """Without a plan, along rows or along features: few rows make small matmuls, each of which reads the weight, and
    where there are fewer than ranks, pieces without any."""
    total = sum(rows)
    few = max(rows) < fewest_rows if overlap.mode in ("auto", "flash") else not min(rows)
    cuts = few and total and overlap.mode != "collective"  # how a backend cuts is its own affair
    features = pieces_of_features(op, sizes, len(rows)) if cuts else ()
    if max(rows) >= max(features, default=0):
        return _unplanned(overlap, op, rows, fewest_rows)
    found = _unplanned(overlap, op, features, fewest_rows * FEWEST_ROWS // total, "features")
    return found._replace(reason=f"{found.reason}; pieces of features, as {total} rows are few")


def _unplanned(overlap: Overlap, op: str, rows: Sequence[int], fewest_rows: int, along: str = "rows") -> Choice:
    """Without a plan; ``rows`` are features where pieces are cut ``along`` them."""
    if overlap.mode == "off":
        return Choice("off", "sliced", 1, "asked", "nothing is overlapped, as asked", along=along)
    if overlap.mode == "collective":
        return Choice("collective", "collective", 1, "asked", "the backend's collective, as asked")
    if overlap.mode == "slice":
        slices, why = _no_more_than(rows, overlap.slices, along) if overlap.slices else (_SLICES, "as is usual")
        return Choice("slice", "sliced", slices, "asked", f"{slices} slices, {why}", along=along)
    if len(rows) == 1:
        return Choice("flash", overlap.pattern, 1, "one_rank", "one rank has nothing to move")
    if overlap.splits:
        splits, why = _no_more_than(rows, overlap.splits, along)
        return Choice("flash", overlap.pattern, splits, "asked", f"{splits} splits, {why}", along=along)
    splits = rule_of_thumb(op, rows, fewest_rows)
    why = f"{splits} splits by rule of thumb, not by a plan"
    return Choice("flash", overlap.pattern, splits, "rule_of_thumb", why, along=along)


def _no_more_than(rows: Sequence[int], asked: int, along: str) -> tuple[int, str]:
    """Parts of a piece: those asked for, or one a row (or a feature) where there are fewer."""
    most = max(1, *rows)
    return (asked, "as asked") if asked <= most else (most, f"one a {along[:-1]}, where {asked} were asked for")


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
