"""The tensors behind the names of an all-to-all: matrices cut by rows on one side of it, by features on the other.

M rows in all, n ranks, rank r; in rows of rank r and features of rank f
whole      [M, N_r]      own features of all rows, in piece order
strip f    [M_r, N_f]    own rows, features of rank f
block s_t  to features: rows of s, features of t; to rows: rows of t, features of s

The own strip is a part of ``whole``. What arrives is received where it is to stay, and read where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from ..all_to_all import all_to_all
from ..choice import Choice
from ..flow import BLOCK, of_tensor
from ..schedule import Schedule
from .layout import Layout
from .staging import Lease


def new_rows(like: torch.Tensor, rows: int, features: int) -> torch.Tensor:
    """Room ``[rows, features]`` for blocks that arrive and are to stay."""
    with torch.inference_mode(False):  # gloo's threads, which are not in that mode, write to it
        return like.new_empty(rows, features)


class Place(NamedTuple):
    """What the names of a block's splits stand for: a part of it, or all.

    Args:
        matrix: which of several.
        owner: the rank whose rows it has.
        holder: the rank whose features it has.
        rows: names of its rows in the layout, one after another.
        start: first of them in piece order.
        stop: end of them.
    """

    matrix: int
    owner: int
    holder: int
    rows: tuple[str, ...]
    start: int
    stop: int


@lru_cache(maxsize=4096)
def _parsed(name: str) -> tuple[int, int, int, str]:
    match = BLOCK.match(name)
    assert match is not None, name
    letter, source, target, split = match.groups()
    return ord(letter[1]) - ord("a") if letter[1:] else 0, int(source), int(target), f".{split}" if split else ""


class Swapped:
    """Matrices, side by side, whose blocks change hands.

    Args:
        rows: layout of their rows.
        rank: this rank.
        shares: by matrix and rank, the rank's features.
        wholes: by matrix, ``[M, N_r]`` in piece order.
        to_features: the direction.
        lease: for what is not given.
        strips: by matrix and rank, where they are to be kept (that of this rank is not used).
    """

    def __init__(
        self,
        rows: Layout,
        rank: int,
        shares: Sequence[Sequence[range]],
        wholes: Sequence[torch.Tensor],
        lease: Lease,
        *,
        to_features: bool,
        strips: Sequence[Sequence[torch.Tensor]] = (),
    ) -> None:
        self.rows, self.rank, self.shares, self.wholes = rows, rank, shares, wholes
        self._to_features, self._lease = to_features, lease
        self._start, self._stop = rows.starts[rank], rows.starts[rank + 1]
        self._strips = {(i, f): strip for i, each in enumerate(strips) for f, strip in enumerate(each) if f != rank}
        self._passing: dict[str, torch.Tensor] = {}

    def schedule(self, op: str, choice: Choice) -> Schedule:
        """The schedule of ``op`` on these matrices."""
        ranks, counts = range(len(self.rows.owned)), self.rows.rows
        widths = {
            of_tensor("p", i): [
                [len(share[t if self._to_features else s]) * whole.itemsize for t in ranks] for s in ranks
            ]
            for i, (share, whole) in enumerate(zip(self.shares, self.wholes, strict=True))
        }
        return all_to_all(
            [[counts[s if self._to_features else t] for t in ranks] for s in ranks],
            op=op,
            pattern=choice.pattern,
            splits=choice.splits,
            tensors=len(self.wholes),
            row_bytes=widths,
            nodes=choice.nodes,
        )

    def place(self, name: str) -> Place:
        """What the name of a block, or of a split of it, stands for."""
        matrix, source, target, split = _parsed(name)
        owner, holder = (source, target) if self._to_features else (target, source)
        rows = f"x{owner}{split}"
        return Place(matrix, owner, holder, (rows,), *self.rows.range(rows))

    def places(self, names: Iterable[str]) -> list[Place]:
        """The same for several names, all splits of a block as one place: kernels are better with more rows."""
        found: dict[tuple[int, int, int], Place] = {}
        for place in map(self.place, names):
            last = found.setdefault(place[:3], place)
            if last.stop == place.start:
                found[place[:3]] = last._replace(rows=last.rows + place.rows, stop=place.stop)
        return list(found.values())

    def own(self, place: Place) -> slice:
        """The rows of a place of this rank among its own."""
        return slice(place.start - self._start, place.stop - self._start)

    def at(self, place: Place) -> torch.Tensor:
        """What lies there: own features, or own rows."""
        if place.holder == self.rank:
            return self.wholes[place.matrix][place.start : place.stop]
        return self.strip(place.matrix, place.holder)[self.own(place)]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of a block, or of a split of it, this rank's or one that others send each other."""
        place = self.place(name)
        if self.rank in (place.holder, place.owner):
            return self.at(place)
        if name not in self._passing:
            self._passing[name] = self._leased(place.matrix, place.stop - place.start, place.holder)
        return self._passing[name]

    def strip(self, matrix: int, holder: int) -> torch.Tensor:
        """The own rows of a matrix, features of rank ``holder``."""
        if holder == self.rank:
            return self.wholes[matrix][self._start : self._stop]
        if (matrix, holder) not in self._strips:
            self._strips[matrix, holder] = self._leased(matrix, self._stop - self._start, holder)
        return self._strips[matrix, holder]

    def _leased(self, matrix: int, rows: int, holder: int) -> torch.Tensor:
        return self._lease.tensor(rows, len(self.shares[matrix][holder]), self.wholes[matrix].dtype)


class Summed:
    """Rows that are sums of products, each product added in the order in which it comes.

    Args:
        out: ``[rows, columns]``; complete after :meth:`finish`.
        accumulate: dtype of the sums; where it is not that of ``out``, products are rounded once, and their sum once.
        lease: for sums in another dtype.
        bias: ``[columns]``, a term of every row.
        zeroed: whether rows start as zeros, instead of with their first product.
    """

    def __init__(
        self,
        out: torch.Tensor,
        accumulate: torch.dtype,
        lease: Lease,
        *,
        bias: torch.Tensor | None = None,
        zeroed: bool = False,
    ) -> None:
        self.out, self._bias, self._lease = out, bias, lease
        self._exact = accumulate == out.dtype
        self._total = out if self._exact else lease.tensor(out.shape[0], out.shape[1], accumulate)
        self._scratch: torch.Tensor | None = None
        self._begun: set[tuple[int, int]] | None = None if zeroed else set()
        if zeroed:
            self._total.zero_()

    def add(self, start: int, stop: int, product: Callable[[torch.Tensor, float], None]) -> None:
        """Adds a term to rows ``start:stop``, which are always cut in the same places (unless they start as zeros).

        ``product(target, beta)`` writes it there, or with ``beta=1`` adds it.
        """
        rows = self._total[start:stop]
        first = self._begun is not None and (start, stop) not in self._begun
        if self._begun is not None:
            self._begun.add((start, stop))
        if first and self._bias is not None:
            rows.copy_(self._bias)
            first = False
        if self._exact:
            product(rows, 0.0 if first else 1.0)
            return
        made = self._rounded(stop - start)
        product(made, 0.0)
        if first:
            rows.copy_(made)
        else:
            rows += made

    def _rounded(self, rows: int) -> torch.Tensor:
        if self._scratch is None or self._scratch.shape[0] < rows:
            self._scratch = self._lease.tensor(rows, self.out.shape[1], self.out.dtype)
        return self._scratch[:rows]

    def finish(self) -> None:
        """Rounds the sums once."""
        if not self._exact:
            self.out.copy_(self._total)
