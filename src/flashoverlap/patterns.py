"""Builders of schedules: the order in which each rank computes the pieces of a flow and exchanges them.

`n` ranks, a round a column, pieces named by the rank that owns them. Rank 1 of 4, ``direct``:

    gather side    net [x1>0 x2<2][x1>3 x3<3][x1>2 x0<0]            scatter side  net           [p2>2 <0][p3>3 <3][p0>0 <2]
                   mm  [y1=mm(x1)][y2=mm(x2)][y3=mm(x3)][y0=mm(x0)]               mm  [p2=mm(h2)][p3    ][p0     ][z1     ][z1+=]

Gather side: the own piece first, while the others fly in; the last piece computes with the wire idle. Scatter side: the
pieces of others first, the own piece last, while the last partial flies. An ``mlp`` is both at once: own piece's first
matmul at the start, its second at the end, and each other piece goes through both before the next one.

Round d of ``direct`` is the permutation r -> r + d (scatter) or r -> r - d (gather); over ``nodes`` that share a wire
the rounds are those of :mod:`flashoverlap.rounds`. ``ring`` only ever talks to
neighbours: gathered pieces and partial sums are handed on. ``sliced`` is data slicing: whole gathers and whole scatters
on slices of all pieces at once, where the first gather and the last scatter hide behind nothing; with one slice nothing
is overlapped, and the bytes are still the ideal ones (mode ``off``). ``collective`` leaves the movement to the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, islice

from . import deferred
from .flow import Flow, flow_of
from .pieces import Pieces
from .schedule import Collective, Compute, Exchange, Op, Programs, Schedule, ScheduleError, Size

PATTERNS = ("direct", "ring", "sliced", "collective")


def split_sizes(total: int, parts: int) -> list[int]:
    """Sizes of ``parts`` nearly equal parts of ``total``, larger ones first: the rule of ``torch.tensor_split``."""
    each, more = divmod(total, parts)
    return [each + (part < more) for part in range(parts)]


def build(
    op: str,
    rows: Sequence[int],
    *,
    pattern: str = "direct",
    splits: int = 1,
    row_bytes: Mapping[str, int] | None = None,
    nodes: int = 1,
) -> Schedule:
    """Builds the schedule of a flow.

    Args:
        op: name of a flow (:data:`flashoverlap.flow.FLOWS`), outputs left out by ``-letter``.
        rows: rows of the piece that each rank owns; its length is the number of ranks. Pieces may be unequal or empty.
        pattern: "direct", "ring", "sliced" or "collective".
        splits: parts that every piece is cut into (for "sliced", the number of slices; for "collective", 1).
        row_bytes: bytes of one row by letter of the piece; 1 where it is not given.
        nodes: spreads the rounds of "direct" and "sliced" over so many nodes, of as many ranks each.

    Raises:
        ScheduleError: no ranks, negative rows, splits below one, an unknown pattern, ranks that nodes do not divide.
        ValueError: an unknown ``op``.
    """
    widths = tuple(sorted((row_bytes or {}).items()))
    build_it = _build if _is_small(len(rows), splits) else _build.__wrapped__
    return build_it(op, tuple(rows), pattern, splits, widths, nodes)


_MOST_CACHED = 2**14  # exchanges of all ranks, about 10 MB of schedule; a larger one lives as long as its user does


def _is_small(ranks: int, splits: int) -> bool:
    return ranks**2 * splits <= _MOST_CACHED


@lru_cache(maxsize=256)
def _build(
    op: str, rows: tuple[int, ...], pattern: str, splits: int, widths: tuple[tuple[str, int], ...], nodes: int
) -> Schedule:
    flow = flow_of(op)
    n = len(rows)
    check_arguments(op, rows, pattern, splits, nodes)
    pieces = Pieces(n, splits, nodes if pattern in ("direct", "sliced") else 1)
    period = n // pieces.nodes if pieces.nodes > 1 else 1
    programs = (_programs if _is_small(n, splits) else _programs.__wrapped__)(
        op, pattern, n, splits, pieces.nodes, period if len(set(rows)) == 1 else n
    )
    width = dict(widths)
    letters = dict.fromkeys((*flow.letters, "z" if flow.reduce else "", flow.extra))
    sizes = [
        (pieces.name(letter, owner, split), Size(part, width.get(letter, width.get("p", 1) if letter == "z" else 1)))
        for letter in letters
        if letter
        for owner, owned in enumerate(rows)
        for split, part in enumerate(split_sizes(owned, splits))
    ]
    sizes += [(w.write, Size(1, width.get(w.write, 1))) for w in flow.wgrads]
    return Schedule(op, programs, tuple(sizes))


@lru_cache(maxsize=256)
def _programs(op: str, pattern: str, ranks: int, splits: int, nodes: int, period: int) -> Programs:
    """The programs, which know of no sizes: one more number of rows costs none anew."""
    return Programs(partial(_PROGRAMS[pattern], flow_of(op), Pieces(ranks, splits, nodes)), ranks, period)


def check_arguments(op: str, rows: Sequence[int], pattern: str, splits: int, nodes: int = 1) -> None:
    """Raises ScheduleError for arguments that no schedule can be built from."""
    if not rows or not all(isinstance(part, int) and part >= 0 for part in rows):
        raise ScheduleError(f"{op} needs rows of zero or more for one rank or more, not {list(rows)}")
    if pattern not in PATTERNS:
        raise ScheduleError(f"unknown pattern {pattern!r}; known: {', '.join(PATTERNS)}")
    if splits < 1:
        raise ScheduleError(f"{op} needs at least one split, not {splits}")
    if pattern == "collective" and splits != 1:
        raise ScheduleError(
            f"pattern 'collective' moves whole pieces; splits={splits} means nothing there (use 'sliced')"
        )
    if nodes < 1 or len(rows) % nodes:
        raise ScheduleError(f"{op} on {len(rows)} ranks cannot be spread over {nodes} nodes of equal size")


# --- direct -----------------------------------------------------------------------------------------------------------


def _direct(flow: Flow, pieces: Pieces, rank: int) -> Iterable[Op]:
    if flow.reduce == "all_reduce":
        yield from _direct_all_reduce(flow, pieces, rank)
        return
    if flow.deferred:
        yield from deferred.direct(flow, pieces, rank)
        return
    if flow.gather:
        yield from _direct_gather(flow.letters[0], pieces, rank)
    if flow.extra:
        yield from _direct_gather(flow.extra, pieces, rank)
    # [Note: own piece first and last] With a gather the own piece is all that there is to compute at first; with a
    # reduction its last kernel is what hides the flight of the last partials. In between it would hide nothing.
    early = 0 if not flow.gather else len(flow.kernels) - bool(flow.reduce)
    yield from _kernels(flow, pieces, rank, range(early))
    for other, source in pieces.rounds(rank):  # gathered pieces arrive in this order, and partials leave in it
        for split in range(pieces.splits):
            yield from _kernels(flow, pieces, other, range(len(flow.kernels)), split)
            if flow.reduce:
                yield Exchange(
                    pieces.name("p", other, split), other, f"{pieces.name('p', rank, split)}@{source}", source
                )
    sources = pieces.sources(rank)
    if flow.reduce and not flow.gather:
        yield from _kernels(flow, pieces, rank, range(early, len(flow.kernels) - 1))
    own_first = flow.reduce and flow.extra and not flow.gather
    # [Note: own piece before wgrad] Where nothing else is gathered, wgrad waits for the extra pieces from the start of
    # the wire; the own piece's dgrad fills that wait. The partials then fly behind wgrad and are added after it.
    if own_first:
        for split in range(pieces.splits):
            yield _own(flow, pieces, rank, split, ())
    yield from _wgrads(flow, pieces)
    if own_first:
        for split in range(pieces.splits):
            yield from _sum(pieces, rank, split, sources)
    elif flow.reduce:
        yield from _own_last(flow, pieces, rank, sources)


def _own_last(flow: Flow, pieces: Pieces, rank: int, sources: Sequence[int]) -> Iterable[Op]:
    """The own piece's last kernel: its last split first, since the partials of that one still fly; the additions of
    the others are left to the matmuls."""
    last = pieces.splits - 1
    yield _own(flow, pieces, rank, last, ())
    for split in range(last):
        yield _own(flow, pieces, rank, split, sources)
    yield from _sum(pieces, rank, last, sources)


def _own(flow: Flow, pieces: Pieces, rank: int, split: int, sources: Sequence[int]) -> Compute:
    own = pieces.name("p", rank, split)
    read = pieces.name(flow.letters[-2], rank, split)
    return Compute(
        flow.kernels[-1], (read,), (pieces.name("z", rank, split),), tuple(f"{own}@{source}" for source in sources)
    )


def _sum(pieces: Pieces, rank: int, split: int, sources: Sequence[int]) -> Iterable[Op]:
    own, total = pieces.name("p", rank, split), pieces.name("z", rank, split)
    if sources:
        yield Compute("", (), (total,), (total, *(f"{own}@{source}" for source in sources)))


def _kernels(flow: Flow, pieces: Pieces, owner: int, which: range, split: int | None = None) -> Iterable[Op]:
    """The kernels ``which`` on one piece (all its splits in one call) or on one split of it."""
    for index in which:
        source, target = flow.letters[index], flow.letters[index + 1]
        if split is None:
            yield Compute(flow.kernels[index], pieces.of(source, owner), pieces.of(target, owner))
        else:
            yield Compute(
                flow.kernels[index], (pieces.name(source, owner, split),), (pieces.name(target, owner, split),)
            )


def _wgrads(flow: Flow, pieces: Pieces) -> Iterable[Op]:
    for w in flow.wgrads:
        yield Compute(w.kernel, pieces.all(w.reads) if w.reads else (), (w.write,))


def _direct_gather(letter: str, pieces: Pieces, rank: int, splits: Iterable[int] | None = None) -> Iterable[Op]:
    for source, to in pieces.rounds(rank):
        for split in range(pieces.splits) if splits is None else splits:
            yield Exchange(pieces.name(letter, rank, split), to, pieces.name(letter, source, split), source)


def _direct_all_reduce(flow: Flow, pieces: Pieces, rank: int) -> Iterable[Op]:
    """Split by split: the reduction of one split flies while the next is computed, and its gather one split later.

    rank 1 of 2, 2 splits:   net           [p0.0>0 <0][p0.1>0 <0][z1.0>0 <0]      [z1.1>0 <0]
                             mm  [p0.0    ][p0.1     ][z1.0+    ][z1.1     ][z1.1+]

    With a weight gradient to compute at the end, which hides all gathers, no sum is waited for before it must be.
    """
    last, sources = pieces.splits - 1, pieces.sources(rank)

    def summed(split: int) -> Iterable[Op]:
        yield _own(flow, pieces, rank, split, sources)
        yield from _direct_gather("z", pieces, rank, (split,))

    for split in range(pieces.splits):
        for other, source in pieces.rounds(rank):
            yield from _kernels(flow, pieces, other, range(len(flow.kernels)), split)
            yield Exchange(pieces.name("p", other, split), other, f"{pieces.name('p', rank, split)}@{source}", source)
        if split > 0 and not flow.wgrads:
            yield from summed(split - 1)
    yield _own(flow, pieces, rank, last, ())
    if flow.wgrads:
        for split in range(last):
            yield from summed(split)
    yield from _sum(pieces, rank, last, sources)
    yield from _direct_gather("z", pieces, rank, (last,))
    yield from _wgrads(flow, pieces)


# --- ring -------------------------------------------------------------------------------------------------------------


def _ring(flow: Flow, pieces: Pieces, rank: int) -> Iterable[Op]:
    """Pieces go round towards higher ranks, and partial sums with them.

    rank 1 of 3   gather   net [x1>2 x0<0][x0>2 x2<0]                scatter  net          [p0>2 p2@0<0]      [p2>2 p1@0<0]
                           mm  [y1       ][y0       ][y2]                     mm  [p0=mm  ][p2=mm      ][p2+=][z1=mm     ][z1+=]
    """
    if flow.deferred:
        yield from deferred.ring(flow, pieces, rank)
        return
    n, before, after = pieces.ranks, (rank - 1) % pieces.ranks, (rank + 1) % pieces.ranks
    letters = filter(None, (flow.letters[0] if flow.gather else "", flow.extra))
    gathers = chain.from_iterable(_ring_gather(letter, pieces, rank) for letter in letters)
    # [Note: ring takes turns] A partial is waited for at every hop, so it must not queue behind the whole gather: the
    # gather stays one round ahead, and moves on by one exchange for each partial that has been posted.
    yield from islice(gathers, pieces.splits + 1) if flow.reduce else gathers
    early = 0 if not flow.gather else len(flow.kernels) - bool(flow.reduce)
    yield from _kernels(flow, pieces, rank, range(early))
    for distance in range(1, n):
        owner = (rank - distance) % n
        for split in range(pieces.splits):
            yield from _kernels(flow, pieces, owner, range(len(flow.kernels)), split)
            if flow.reduce:
                part = pieces.name("p", owner, split)
                if distance > 1:
                    yield Compute("", (), (part,), (part, f"{part}@{before}"))
                yield Exchange(part, after, f"{pieces.name('p', (owner - 1) % n, split)}@{before}", before)
                yield from islice(gathers, 1)
    yield from gathers
    own_first = flow.reduce and flow.extra and not flow.gather
    if own_first:  # [Note: own piece before wgrad]
        for split in range(pieces.splits):
            yield _own(flow, pieces, rank, split, ())
    sources = [before] if n > 1 else []
    if flow.reduce != "all_reduce":
        yield from _wgrads(flow, pieces)
    if flow.reduce:
        if not flow.gather:
            yield from _kernels(flow, pieces, rank, range(early, len(flow.kernels) - 1))
        if own_first:
            for split in range(pieces.splits):
                yield from _sum(pieces, rank, split, sources)
        else:
            yield from _own_last(flow, pieces, rank, sources)
    if flow.reduce == "all_reduce":
        yield from _ring_gather("z", pieces, rank)
        yield from _wgrads(flow, pieces)


def _ring_gather(letter: str, pieces: Pieces, rank: int) -> Iterable[Op]:
    n, before, after = pieces.ranks, (rank - 1) % pieces.ranks, (rank + 1) % pieces.ranks
    for distance in range(n - 1):
        mine, theirs = (rank - distance) % n, (rank - distance - 1) % n
        for split in range(pieces.splits):
            yield Exchange(pieces.name(letter, mine, split), after, pieces.name(letter, theirs, split), before)


# --- sliced and collective --------------------------------------------------------------------------------------------


def _sliced(flow: Flow, pieces: Pieces, rank: int) -> Iterable[Op]:
    """Whole gathers and scatters on slices of all pieces, made of the ideal bytes.

    rank 1 of 2, 2 slices   net [x1.0>0 x0.0<0][x1.1>0 x0.1<0][p0.0>0 p1.0@0<0]      [p0.1>0 p1.1@0<0]
                            mm                 [y0.0,y1.0=mm ][y0.1,y1.1=mm   ][z1.0 ]                [z1.1]
    """
    sources = pieces.sources(rank)
    overlaps = pieces.splits > 1
    gathered = (flow.letters[0] if flow.gather else "", flow.extra if overlaps else "")
    for letter in filter(None, gathered):
        for split in range(pieces.splits):
            yield from _direct_gather(letter, pieces, rank, (split,))
    for split in range(pieces.splits):
        yield from _slice_kernels(flow, pieces, split)
        if flow.reduce:
            for other, source in pieces.rounds(rank):
                yield Exchange(
                    pieces.name("p", other, split), other, f"{pieces.name('p', rank, split)}@{source}", source
                )
        if flow.reduce and split > 0:
            yield from _slice_sum(flow, pieces, rank, split - 1, sources)
    if overlaps:
        yield from _wgrads(flow, pieces)
    if flow.reduce:
        yield from _slice_sum(flow, pieces, rank, pieces.splits - 1, sources)
    if not overlaps:  # nothing flies beside a kernel: the sum above has waited, and wgrad waits for its gather
        if flow.extra:
            yield from _direct_gather(flow.extra, pieces, rank)
        yield from _wgrads(flow, pieces)


def _slice_kernels(flow: Flow, pieces: Pieces, split: int) -> Iterable[Op]:
    for index, kernel in enumerate(flow.kernels):
        yield Compute(kernel, pieces.slice(flow.letters[index], split), pieces.slice(flow.letters[index + 1], split))


def _slice_sum(flow: Flow, pieces: Pieces, rank: int, split: int, sources: Sequence[int]) -> Iterable[Op]:
    own, total = pieces.name("p", rank, split), pieces.name("z", rank, split)
    yield Compute("", (), (total,), (own, *(f"{own}@{source}" for source in sources)))
    if flow.reduce == "all_reduce":
        yield from _direct_gather("z", pieces, rank, (split,))


def _collective(flow: Flow, pieces: Pieces, rank: int) -> Iterable[Op]:
    for letter in (flow.letters[0] if flow.gather else "", flow.extra):
        if letter and pieces.ranks > 1:
            yield Collective("all_gather", (pieces.name(letter, rank, 0),), pieces.all(letter))
    yield from _slice_kernels(flow, pieces, 0)
    if flow.reduce:
        outputs = pieces.all("z") if flow.reduce == "all_reduce" else (pieces.name("z", rank, 0),)
        yield Collective(flow.reduce, pieces.all("p"), outputs)
    yield from _wgrads(flow, pieces)


_PROGRAMS: dict[str, Callable[[Flow, Pieces, int], Iterable[Op]]] = {
    "direct": _direct,
    "ring": _ring,
    "sliced": _sliced,
    "collective": _collective,
}

all_gather_matmul = partial(build, "all_gather_matmul")
matmul_reduce_scatter = partial(build, "matmul_reduce_scatter")
all_reduce = partial(build, "all_reduce")
mlp = partial(build, "mlp")
