"""Builders of all-to-alls: every block goes from the rank that makes it to the rank that it is made for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from .patterns import check_arguments, split_sizes
from .schedule import Collective, Compute, Exchange, Op, Schedule, ScheduleError, Size


def all_to_all(
    rows: Sequence[Sequence[int]],
    *,
    pattern: str = "direct",
    splits: int = 1,
    row_bytes: Mapping[str, int] | None = None,
) -> Schedule:
    """Builds an all-to-all behind the kernel that makes its blocks; block ``p1_2`` goes from rank 1 to rank 2.

    rank 1 of 3   direct   net                [p1_2>2 p0_1<0][p1_0>0 p2_1<2]
                           mm  [p1_2=mm(a1_2)][p1_0=mm(a1_0)][p1_1=mm(a1_1)]

    Args:
        rows: ``rows[source][target]`` of every block. The other arguments and the errors are those of :func:`build`.
    """
    n = len(rows)
    check_arguments("all_to_all", [min(row, default=0) for row in rows], pattern, splits)
    if any(len(row) != n for row in rows):
        raise ScheduleError(f"all_to_all between {n} ranks needs {n} rows of {n} sizes, not {[len(r) for r in rows]}")

    def block(letter: str, source: int, target: int, split: int) -> str:
        return f"{letter}{source}_{target}" + ("" if splits == 1 else f".{split}")

    width = row_bytes or {}
    sizes = tuple(
        (block(letter, source, target, split), Size(part, width.get(letter, 1)))
        for letter in "ap"
        for source in range(n)
        for target in range(n)
        for split, part in enumerate(split_sizes(rows[source][target], splits))
    )
    programs = tuple(tuple(_ALL_TO_ALL[pattern](block, n, splits, rank)) for rank in range(n))
    return Schedule("all_to_all", programs, sizes)


Block = Callable[[str, int, int, int], str]


def _make(block: Block, source: int, targets: Iterable[int], splits: Iterable[int]) -> Compute:
    blocks = [(source, target, split) for split in splits for target in targets]
    return Compute("mm", tuple(block("a", *b) for b in blocks), tuple(block("p", *b) for b in blocks))


def _all_to_all_direct(block: Block, n: int, splits: int, rank: int) -> Iterable[Op]:
    for distance in range(1, n):
        other, source = (rank + distance) % n, (rank - distance) % n
        for split in range(splits):
            yield _make(block, rank, (other,), (split,))
            yield Exchange(block("p", rank, other, split), other, block("p", source, rank, split), source)
    yield _make(block, rank, (rank,), range(splits))


def _all_to_all_ring(block: Block, n: int, splits: int, rank: int) -> Iterable[Op]:
    """The block for the rank at distance d is handed on d times, the farthest first."""
    before, after = (rank - 1) % n, (rank + 1) % n
    for distance in range(n - 1, 0, -1):
        for split in range(splits):
            yield _make(block, rank, ((rank + distance) % n,), (split,))
            for hop in range(distance):
                mine, theirs = (rank - hop) % n, (rank - hop - 1) % n
                yield Exchange(
                    block("p", mine, (mine + distance) % n, split),
                    after,
                    block("p", theirs, (theirs + distance) % n, split),
                    before,
                )
    yield _make(block, rank, (rank,), range(splits))


def _all_to_all_sliced(block: Block, n: int, splits: int, rank: int) -> Iterable[Op]:
    for split in range(splits):
        yield _make(block, rank, range(n), (split,))
        for distance in range(1, n):
            other, source = (rank + distance) % n, (rank - distance) % n
            yield Exchange(block("p", rank, other, split), other, block("p", source, rank, split), source)


def _all_to_all_collective(block: Block, n: int, splits: int, rank: int) -> Iterable[Op]:
    yield _make(block, rank, range(n), (0,))
    yield Collective(
        "all_to_all",
        tuple(block("p", rank, target, 0) for target in range(n)),
        tuple(block("p", source, rank, 0) for source in range(n)),
    )


_ALL_TO_ALL: dict[str, Callable[[Block, int, int, int], Iterable[Op]]] = {
    "direct": _all_to_all_direct,
    "ring": _all_to_all_ring,
    "sliced": _all_to_all_sliced,
    "collective": _all_to_all_collective,
}
