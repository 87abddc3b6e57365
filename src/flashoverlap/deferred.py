"""Builders of reductions that are left open: all kernels first, and the sums when the run is taken up again.

Backward of a layer makes its weight gradient and goes on to the layer before; what the other ranks add to the own piece
comes meanwhile. Rank 1 of 3:

    direct   net      [p2>2 p1@0<0][p0>0 p1@2<2]              ring   net      [p0>2 p2@0<0]           [p2>2 p1@0<0]
             mm  [p2 ][p0         ][z1         ] ... [z1+=]          mm  [p0 ][p2         ][z1 ] ... [p2+=][z1+=  ]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .flow import Flow
from .pieces import Pieces
from .schedule import Compute, Exchange, Op


def direct(flow: Flow, pieces: Pieces, rank: int) -> Iterable[Op]:
    """A rank's part of it where every partial goes straight to the rank that owns its piece."""
    for other, source in pieces.rounds(rank):
        for split in range(pieces.splits):
            yield _kernel(flow, pieces, other, split)
            yield Exchange(pieces.name("p", other, split), other, f"{pieces.name('p', rank, split)}@{source}", source)
    yield from _own(flow, pieces, rank)
    yield from _sums(pieces, rank, pieces.sources(rank))


def ring(flow: Flow, pieces: Pieces, rank: int) -> Iterable[Op]:
    """The same where partial sums are handed on to the next rank."""
    n, before, after = pieces.ranks, (rank - 1) % pieces.ranks, (rank + 1) % pieces.ranks

    def hop(owner: int, split: int) -> Exchange:
        arriving = pieces.name("p", (owner - 1) % n, split)
        return Exchange(pieces.name("p", owner, split), after, f"{arriving}@{before}", before)

    for distance in range(1, n):
        for split in range(pieces.splits):
            yield _kernel(flow, pieces, (rank - distance) % n, split)
            if distance == 1:  # the others wait for what is handed on
                yield hop(before, split)
    yield from _own(flow, pieces, rank)
    for distance in range(2, n):
        owner = (rank - distance) % n
        for split in range(pieces.splits):
            part = pieces.name("p", owner, split)
            yield Compute("", (), (part,), (part, f"{part}@{before}"))
            yield hop(owner, split)
    yield from _sums(pieces, rank, [before] if n > 1 else [])


def _kernel(flow: Flow, pieces: Pieces, owner: int, split: int) -> Op:
    source, target = flow.letters
    return Compute(flow.kernels[0], (pieces.name(source, owner, split),), (pieces.name(target, owner, split),))


def _own(flow: Flow, pieces: Pieces, rank: int) -> Iterable[Op]:
    for split in range(pieces.splits):
        yield Compute(flow.kernels[0], (pieces.name(flow.letters[0], rank, split),), (pieces.name("z", rank, split),))


def _sums(pieces: Pieces, rank: int, sources: Sequence[int]) -> Iterable[Op]:
    """Terms are added in the order of their ranks, whoever owns the piece."""
    for split in range(pieces.splits if sources else 0):
        own, total = pieces.name("p", rank, split), pieces.name("z", rank, split)
        terms = {rank: total} | {source: f"{own}@{source}" for source in sources}
        yield Compute("", (), (total,), tuple(terms[source] for source in sorted(terms)))
