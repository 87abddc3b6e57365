"""Builders of all-to-alls: every block goes from the rank that makes it to the rank that it is made for.

Rank 1 of 3, ``direct``; ``p1_2`` is the block from rank 1 for rank 2:

    made before the exchange   net                [p1_2>2 p0_1<0][p1_0>0 p2_1<2]
                               mm  [p1_2=mm(a1_2)][p1_0=mm(a1_0)][p1_1=mm(a1_1)]

    used after it              net [p1_2>2 p0_1<0][p1_0>0 p2_1<2]
                               mm  [z1=mm(p1_1)  ][z1+=mm(p0_1) ][z1+=mm(p2_1)]

    both                       net           [p1_2>2 p0_1<0][p1_0>0 p2_1<2]
                               mm  [p1_2    ][p1_0         ][p1_1  ][z1=p1_1][z1+=p0_1][z1+=p2_1]

The blocks of others are made first, so that the wire never waits for more than one; then all that is local, which hides
the last flight: the own block, from end to end, and weight gradients; then the blocks that come, in the order in which
they were sent. Tensors that move side by side (q, k, v) take turns, split by split.

``ring`` hands blocks on between neighbours. ``sliced`` exchanges a slice of all blocks at once, and one slice overlaps
nothing (mode ``off``). ``collective`` leaves the movement to the backend. Over nodes that share a wire the rounds of
``direct`` and ``sliced`` are those of :mod:`flashoverlap.rounds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import product

from .flow import BLOCK, PIECE, Flow, flow_of, of_tensor
from .patterns import check_arguments, split_sizes
from .rounds import partners
from .schedule import Collective, Compute, Exchange, Op, Programs, Schedule, ScheduleError, Size, Sizes

Matrix = Sequence[Sequence[int]]
Part = tuple[int, int]  # a tensor and a split of its block


def all_to_all(
    rows: Matrix,
    *,
    op: str = "all_to_all",
    pattern: str = "direct",
    splits: int = 1,
    tensors: int = 1,
    row_bytes: Mapping[str, int | Matrix] | None = None,
    nodes: int = 1,
) -> Schedule:
    """Builds the schedule of an all-to-all with its kernels.

    Args:
        rows: ``rows[source][target]`` of every block; blocks may be unequal or empty.
        op: name of a flow (:data:`flashoverlap.flow.ALL_TO_ALLS`), outputs left out by ``-letter``.
        pattern: "direct", "ring", "sliced" or "collective".
        splits: parts that every block is cut into (for "sliced", the number of slices; for "collective", 1).
        tensors: how many tensors move side by side.
        row_bytes: bytes of one row by letter, alike for all blocks or ``[source][target]``; 1 where it is not given.
        nodes: spreads the rounds of "direct" and "sliced" over so many nodes, of as many ranks each.

    Raises:
        ScheduleError: sizes that are no square, negative rows, sums of unequal rows, splits or tensors out of range, an
            unknown pattern, ranks that nodes do not divide.
        ValueError: an unknown ``op``, or one that is no all-to-all.
    """
    widths = {
        letter: width if isinstance(width, int) else tuple(map(tuple, width))
        for letter, width in (row_bytes or {}).items()
    }
    arguments = (op, tuple(map(tuple, rows)), pattern, splits, tensors, tuple(sorted(widths.items())), nodes)
    small = len(rows) ** 2 * splits * tensors <= _MOST_CACHED
    return (_build if small else _build.__wrapped__)(*arguments)


_MOST_CACHED = 2**13  # exchanges of all ranks; a larger schedule lives as long as its user does


@lru_cache(maxsize=256)
def _build(
    op: str,
    rows: tuple[tuple[int, ...], ...],
    pattern: str,
    splits: int,
    tensors: int,
    widths: tuple[tuple[str, int | tuple[tuple[int, ...], ...]], ...],
    nodes: int,
) -> Schedule:
    flow = flow_of(op)
    _check(flow, rows, pattern, splits, tensors, nodes)
    blocks = Blocks(len(rows), splits, tensors)
    sizes = _Sizes(flow, rows, blocks, dict(widths))
    alike = len({part for row in rows for part in row}) == 1 and all(isinstance(each, int) for _, each in widths)
    n = len(rows)
    nodes = nodes if pattern in ("direct", "sliced") else 1
    period = n // nodes if nodes > 1 else 1
    programs = Programs(lambda rank: _PROGRAMS[pattern](_Rank(flow, blocks, rank, nodes)), n, period if alike else n)
    return Schedule(op, programs, Sizes(partial(_names, flow, blocks), sizes.of))


def _names(flow: Flow, blocks: Blocks) -> Iterable[str]:
    """All blocks, sums and weight gradients."""
    for letter in flow.letters:
        if letter != "z":
            for tensor in range(blocks.tensors):
                for owner in blocks.owners:
                    yield from (blocks.name(letter, *owner, (tensor, split)) for split in range(blocks.splits))
    if flow.reduce:
        for target in range(blocks.ranks):
            yield from (blocks.total(target, split) for split in range(blocks.splits))
    for w in flow.wgrads:
        yield from (of_tensor(w.write, tensor) for tensor in range(blocks.tensors if w.reads else 1))


class _Sizes:
    """Sizes by the names of blocks, sums and weight gradients."""

    def __init__(
        self, flow: Flow, rows: Matrix, blocks: Blocks, widths: Mapping[str, int | tuple[tuple[int, ...], ...]]
    ) -> None:
        self._rows, self._splits, self._widths = rows, blocks.splits, widths
        tensors = range(blocks.tensors)
        self._letters = {of_tensor(letter, each) for letter in flow.letters if letter != "z" for each in tensors}
        self._writes = {of_tensor(w.write, each) for w in flow.wgrads for each in (tensors if w.reads else [0])}
        self._sums = bool(flow.reduce)

    def of(self, name: str) -> Size | None:
        """The size of a buffer; None for a name that is none."""
        block, total = BLOCK.match(name), PIECE.match(name)
        if block is not None and block[1] in self._letters:
            return self._split(block[1], int(block[2]), int(block[3]), block[4])
        if total is not None and total[1] == "z" and self._sums:
            return self._split("z", int(total[2]), int(total[2]), total[3])
        return Size(1, self._width(name, 0, 0)) if name in self._writes else None

    def _split(self, letter: str, source: int, target: int, named: str | None) -> Size | None:
        split = int(named or 0)
        if (named is None) != (self._splits == 1) or max(source, target) >= len(self._rows) or split >= self._splits:
            return None
        return Size(split_sizes(self._rows[source][target], self._splits)[split], self._width(letter, source, target))

    def _width(self, letter: str, source: int, target: int) -> int:
        found = self._widths.get(letter, 1)
        return found if isinstance(found, int) else found[source][target]


def _check(flow: Flow, rows: Matrix, pattern: str, splits: int, tensors: int, nodes: int) -> None:
    op, n = flow.op, len(rows)
    if flow.swap is None:
        raise ValueError(f"{op} is no all-to-all")
    check_arguments(op, [min(row, default=0) for row in rows], pattern, splits, nodes)
    if any(len(row) != n for row in rows):
        raise ScheduleError(f"{op} between {n} ranks needs {n} rows of {n} sizes, not {[len(row) for row in rows]}")
    if not 1 <= tensors <= 26:
        raise ScheduleError(f"{op} moves 1 to 26 tensors side by side, not {tensors}")
    unequal = [column for column in zip(*rows, strict=True) if len(set(column)) > 1]
    if flow.reduce and unequal:
        raise ScheduleError(f"{op} sums blocks of equal rows; those for one rank have {list(unequal[0])}")


class Blocks:
    """Names of blocks: ``name("p", 1, 2, (0, 3))`` is split 3 of the first tensor's block ``p1_2``."""

    def __init__(self, ranks: int, splits: int, tensors: int) -> None:
        self.ranks, self.splits, self.tensors = ranks, splits, tensors
        self.parts = tuple((tensor, split) for split in range(splits) for tensor in range(tensors))

    @property
    def owners(self) -> Iterable[tuple[int, int]]:
        """Source and target of every block."""
        return product(range(self.ranks), range(self.ranks))

    def name(self, letter: str, source: int, target: int, part: Part) -> str:
        return f"{of_tensor(letter, part[0])}{source}_{target}{self._split(part[1])}"

    def total(self, target: int, split: int) -> str:
        """The sum of what came to a rank."""
        return f"z{target}{self._split(split)}"

    def slice(self, split: int) -> tuple[Part, ...]:
        """One split of all tensors."""
        return tuple((tensor, split) for tensor in range(self.tensors))

    def _split(self, split: int) -> str:
        return "" if self.splits == 1 else f".{split}"


class _Rank:
    """What one rank can do in an all-to-all; a pattern is an order of that."""

    def __init__(self, flow: Flow, blocks: Blocks, rank: int, nodes: int) -> None:
        self.flow, self.blocks, self.rank = flow, blocks, rank
        self.rounds = partners(blocks.ranks, rank, nodes)
        self.makes = bool(flow.swap)
        self._begun: set[str] = set()  # sums that have a term

    def make(self, targets: Iterable[int], parts: Sequence[Part]) -> Iterable[Op]:
        """The kernels before the exchange, for blocks of this rank."""
        which = [(self.rank, target, part) for part in parts for target in targets]
        for index, kernel in enumerate(self.flow.kernels[: self.flow.swap]):
            source, target = self.flow.letters[index : index + 2]
            reads, writes = (tuple(self.blocks.name(letter, *each) for each in which) for letter in (source, target))
            yield Compute(kernel, reads, writes)

    def use(self, source: int, part: Part) -> Iterable[Op]:
        """The kernels after the exchange, and the weight gradient, of a part that came from ``source``."""
        arrived = self.blocks.name("p", source, self.rank, part)
        for kernel in self.flow.kernels[self.flow.swap :]:
            if self.flow.reduce:
                yield self._added(kernel, arrived, self.blocks.total(self.rank, part[1]))
            else:
                yield Compute(kernel, (arrived,), (self.blocks.name(self.flow.output, source, self.rank, part),))
        for w in self.flow.wgrads:
            if w.reads:
                yield self._added(w.kernel, arrived, of_tensor(w.write, part[0]))

    def _added(self, kernel: str, read: str, total: str) -> Compute:
        begun = total in self._begun
        self._begun.add(total)
        return Compute(kernel, (read,), (total,), (total,) if begun else ())

    def local(self) -> Iterable[Op]:
        """Weight gradients that need nothing from others."""
        for w in self.flow.wgrads:
            if not w.reads:
                yield Compute(w.kernel, (), (w.write,))

    def post(self, ahead: int, behind: int, part: Part) -> Exchange:
        """The block for one rank against that from another."""
        name = self.blocks.name
        return Exchange(name("p", self.rank, ahead, part), ahead, name("p", behind, self.rank, part), behind)

    def hand_on(self, ahead: int, behind: int, part: Part) -> Iterable[Exchange]:
        """The same from neighbour to neighbour, with the blocks that others send each other."""
        n, name = self.blocks.ranks, self.blocks.name
        distance, after, before = (ahead - self.rank) % n, (self.rank + 1) % n, (self.rank - 1) % n
        for hop in range(distance):
            mine, theirs = (self.rank - hop) % n, (self.rank - hop - 1) % n
            yield Exchange(
                name("p", mine, (mine + distance) % n, part),
                after,
                name("p", theirs, (theirs + distance) % n, part),
                before,
            )


def _streamed(
    rank: _Rank, rounds: Sequence[tuple[int, int]], exchanges: Callable[[int, int, Part], Iterable[Exchange]]
) -> Iterable[Op]:
    """Blocks of others first, what is local next, and what comes last."""
    parts = rank.blocks.parts
    for ahead, behind in rounds:
        for part in parts:
            yield from rank.make((ahead,), (part,))
            yield from exchanges(ahead, behind, part)
    yield from rank.make((rank.rank,), parts)
    for part in parts:
        yield from rank.use(rank.rank, part)
    yield from rank.local()
    for _, behind in rounds:
        for part in parts:
            yield from rank.use(behind, part)


def _direct(rank: _Rank) -> Iterable[Op]:
    return _streamed(rank, rank.rounds, lambda ahead, behind, part: (rank.post(ahead, behind, part),))


def _ring(rank: _Rank) -> Iterable[Op]:
    """The block for the rank at distance d is handed on d times, the farthest first."""
    return _streamed(rank, rank.rounds[::-1], rank.hand_on)


def _sliced(rank: _Rank) -> Iterable[Op]:
    """Whole exchanges of slices of all blocks: what uses a slice waits for its last block first.

    rank 1 of 2, 2 slices   net           [p1_0.0>0 p0_1.0<0][p1_0.1>0 p0_1.1<0]
                            mm  [p1_*.0  ][p1_*.1           ][z1.0             ][z1.1]
    """
    blocks, n = rank.blocks, rank.blocks.ranks

    def use(split: int) -> Iterable[Op]:
        for _, behind in [*rank.rounds[::-1], (rank.rank, rank.rank)]:
            for part in reversed(blocks.slice(split)):
                yield from rank.use(behind, part)

    overlaps, late = blocks.splits > 1, blocks.splits - 1
    if not overlaps:  # nothing may hide the exchange
        yield from rank.local()
    for split in range(blocks.splits):
        yield from rank.make(range(n), blocks.slice(split))
        for ahead, behind in rank.rounds:
            yield from (rank.post(ahead, behind, part) for part in blocks.slice(split))
        if rank.makes and split:
            yield from use(split - 1)
    if overlaps:
        yield from rank.local()
    for split in range(late if rank.makes else 0, blocks.splits):
        yield from use(split)


def _collective(rank: _Rank) -> Iterable[Op]:
    blocks, n = rank.blocks, rank.blocks.ranks
    yield from rank.make(range(n), blocks.parts)
    for part in blocks.parts:
        sent = tuple(blocks.name("p", rank.rank, target, part) for target in range(n))
        yield Collective("all_to_all", sent, tuple(blocks.name("p", source, rank.rank, part) for source in range(n)))
    yield from rank.local()
    for _, behind in [(rank.rank, rank.rank), *rank.rounds]:
        for part in blocks.parts:
            yield from rank.use(behind, part)


_PROGRAMS: dict[str, Callable[[_Rank], Iterable[Op]]] = {
    "direct": _direct,
    "ring": _ring,
    "sliced": _sliced,
    "collective": _collective,
}
