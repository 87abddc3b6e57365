"""The tensors behind the names of a schedule: pieces that are gathered, and partial sums that are scattered.

[Note: no copies] Own pieces are read where the caller has them. The first partial that arrives for the own piece is
received into the output itself, so that the matmul of the own piece can add to it (``beta=1``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch

from ..schedule import Compute
from .layout import Layout
from .staging import Lease


class Gathered:
    """Pieces ``[rows, K]`` of a tensor that is sharded over the ranks, gathered into one buffer in piece order.

    Args:
        layout: of the full tensor.
        rank: this rank.
        own: the own shard, contiguous ``[own rows, K]``.
        buffer: ``[total, K]``; its own rows are only filled by :meth:`all`.
    """

    def __init__(self, layout: Layout, rank: int, own: torch.Tensor, buffer: torch.Tensor) -> None:
        self.layout, self.own, self.buffer = layout, own, buffer
        self._start, self._stop = layout.starts[rank], layout.starts[rank + 1]
        self._complete = False

    def tensor(self, name: str) -> torch.Tensor:
        """The piece or split called ``name``."""
        return self._rows(*self.layout.range(name))

    def runs(self, names: tuple[str, ...]) -> Iterator[tuple[torch.Tensor, int, int]]:
        """The rows of these pieces as contiguous tensors, each with its (start, stop) in piece order."""
        for start, stop in self.layout.runs(names):
            for begin, end in self._cuts(start, stop):
                yield self._rows(begin, end), begin, end

    def natural_runs(self, names: tuple[str, ...]) -> Iterator[tuple[torch.Tensor, int, int]]:
        """The same, cut where they stop being contiguous in natural order, with their place in that order."""
        for start, stop, natural in self.layout.segments(names):
            for begin, end in self._cuts(start, stop):
                place = natural + begin - start
                yield self._rows(begin, end), place, place + end - begin

    def _rows(self, start: int, stop: int) -> torch.Tensor:
        own = self._start <= start < stop <= self._stop  # not another's empty piece, which is written to
        return self.own[start - self._start : stop - self._start] if own else self.buffer[start:stop]

    def _cuts(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        edges = [start, *(edge for edge in (self._start, self._stop) if start < edge < stop), stop]
        return pairwise(edges)

    def all(self) -> torch.Tensor:
        """The full tensor in piece order; all pieces must have arrived."""
        if not self._complete:
            self.buffer[self._start : self._stop].copy_(self.own)
            self._complete = True
        return self.buffer


class Scattered:
    """Partial sums ``[rows, N]`` of every piece, of which the own piece ends here as the sum over all ranks.

    Args:
        layout: of the full result.
        rank: this rank.
        out: the own rows of the result, contiguous ``[own rows, N]``.
        bias: added once to the own rows; ``[N]``, or ``[own rows, 1]`` where rows have a bias each.
        accumulate: dtype in which partials are added before they are rounded to that of ``out``.
        travels: dtype in which partials are sent: that of ``out``, or ``accumulate`` where what is sent is a sum.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        out: torch.Tensor,
        lease: Lease,
        *,
        bias: torch.Tensor | None,
        accumulate: torch.dtype,
        travels: torch.dtype,
    ) -> None:
        self.layout, self.out = layout, out
        self._bias = None if bias is None else bias.expand(out.shape)
        self._lease, self._accumulate, self._travels = lease, accumulate, travels
        self._start = layout.starts[rank]
        self._columns = out.shape[1]
        self._exact = accumulate == out.dtype
        self._first: str | None = None
        self._arrivals: dict[str, torch.Tensor] = {}
        self._parts: torch.Tensor | None = None
        self._staged: torch.Tensor | None = None
        self._product: torch.Tensor | None = None

    # --- what is exchanged

    def tensor(self, name: str) -> torch.Tensor:
        """The buffer of a partial (``p2``), of one that arrives (``p1@0``), or of the sum (``z1``)."""
        if "@" in name:
            return self._arrival(name)
        start, stop = self.layout.range(name)
        if name[0] == "z":
            return self._sum_buffer()[start - self._start : stop - self._start]
        return self.parts()[start:stop]

    def parts(self) -> torch.Tensor:
        """All partials of this rank in piece order, as they are sent."""
        if self._parts is None:
            self._parts = self._lease.tensor(self.layout.total, self._columns, self._travels)
        return self._parts

    def _sum_buffer(self) -> torch.Tensor:
        """Where a collective puts the sum."""
        if self._staged is None:
            fits = self._travels == self.out.dtype
            self._staged = self.out if fits else self._lease.tensor(self.out.shape[0], self._columns, self._travels)
        return self._staged

    def _arrival(self, name: str) -> torch.Tensor:
        found = self._arrivals.get(name)
        if found is None:
            start, stop = self.layout.range(name)
            source = name.partition("@")[2]
            own = self._start <= start and stop <= self._start + self.out.shape[0]
            if own and self._first is None:
                self._first = source
            if own and source == self._first and self._travels == self.out.dtype:  # [Note: no copies]
                found = self.out[start - self._start : stop - self._start]
            else:
                found = self._lease.tensor(stop - start, self._columns, self._travels)
            self._arrivals[name] = found
        return found

    # --- what is computed

    def multiply(self, op: Compute, product: Callable[[tuple[str, ...], torch.Tensor, int, float], None]) -> None:
        """Runs a Compute that makes partials or the own sum.

        ``product(names, target, first, beta)`` writes the rows of ``names`` into ``target``, whose row 0 is row
        ``first`` in piece order; with ``beta=1`` it adds to what is there.
        """
        if op.writes[0][0] == "p":
            if self._travels == self.out.dtype:
                product(op.reads, self.parts(), 0, 0.0)
                return
            made = self._scratch(self.layout.total)
            product(op.reads, made, 0, 0.0)
            for name in op.writes:
                start, stop = self.layout.range(name)
                self.parts()[start:stop].copy_(made[start:stop])
            return
        start, stop = self.layout.range(op.writes[0])
        own = slice(start - self._start, stop - self._start)
        rows = self.out[own]
        arrivals = [self._arrival(each) for each in op.adds]
        if not self._arrivals:  # one rank: the product is the sum
            product(op.reads, self.out, self._start, 0.0)
            self._add_bias(rows, own)
        elif arrivals and self._exact and arrivals[0].data_ptr() == rows.data_ptr():
            for arrival in arrivals[1:]:
                rows += arrival
            product(op.reads, self.out, self._start, 1.0)
            self._add_bias(rows, own)
        else:
            made = self._made()
            product(op.reads, made, self._start, 0.0)
            if arrivals:
                self._total(own, [*arrivals, made[own]])

    def add(self, op: Compute) -> None:
        """Runs a Compute that only adds: to a partial that is handed on, or to the own sum."""
        name = op.writes[0]
        start, stop = self.layout.range(name)
        arrivals = [self._arrival(each) for each in op.adds if "@" in each]
        if name[0] == "p":
            for arrival in arrivals:
                self.parts()[start:stop] += arrival
            return
        first = op.adds[0]
        own = slice(start - self._start, stop - self._start)
        made = self.parts()[start:stop] if first[0] == "p" else self._made()[own]
        self._total(own, [*arrivals, made])

    def finish(self) -> None:
        """Ends what a collective has summed, if it was one: adds the bias and rounds once."""
        if self._staged is not None:
            self._total(slice(None), [self._staged])

    def _made(self) -> torch.Tensor:
        """Where this rank's term of the own rows is made: among the partials, none of which is sent from there."""
        rows = self.out.shape[0]
        if self._travels == self.out.dtype:
            return self.parts()[self._start : self._start + rows]
        return self._scratch(rows)

    def _scratch(self, rows: int) -> torch.Tensor:
        if self._product is None or self._product.shape[0] < rows:
            self._product = self._lease.tensor(rows, self._columns, self.out.dtype)
        return self._product

    def _add_bias(self, total: torch.Tensor, own: slice) -> None:
        if self._bias is not None:
            total += self._bias[own]

    def _total(self, own: slice, terms: Sequence[torch.Tensor]) -> None:
        """Own rows as the sum of terms and bias, added left to right in the accumulate dtype and rounded once."""
        rows = self.out[own]
        if self._exact:
            if rows.data_ptr() != terms[0].data_ptr():
                rows.copy_(terms[0])
            for term in terms[1:]:
                rows += term
            self._add_bias(rows, own)
            return
        total = terms[0].to(self._accumulate, copy=True)
        for term in terms[1:]:
            total += term
        self._add_bias(total, own)
        rows.copy_(total)
