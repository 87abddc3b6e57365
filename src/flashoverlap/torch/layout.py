"""Where the rows of each piece lie: in the order of the pieces, and in the caller's tensor.

A tensor ``[outer..., M, inner..., K]`` whose dimension of size M is sharded has ``outer * M * inner`` rows of K
features. *Natural order* is the order of these rows in the full tensor. *Piece order* puts the rows of rank 0 first,
then those of rank 1, and so on, each shard contiguous by itself, as shards are held and sent. With ``outer == 1``
the two are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from ..flow import PIECE
from ..patterns import split_sizes


class Segment(NamedTuple):
    """Rows ``start:stop`` in piece order, which lie at ``natural`` onwards in natural order."""

    start: int
    stop: int
    natural: int


class Layout:
    """The rows of a tensor sharded over ``len(owned)`` ranks, each piece cut into ``splits`` parts.

    Args:
        outer: product of the dimensions before the sharded one.
        owned: how much of the sharded dimension each rank owns.
        inner: product of the dimensions between the sharded one and the features.
        splits: parts of each piece.
    """

    def __init__(self, outer: int, owned: tuple[int, ...], inner: int, splits: int) -> None:
        self.outer, self.owned, self.inner, self.splits = outer, owned, inner, splits
        self.rows = tuple(outer * part * inner for part in owned)
        self.starts = (0, *accumulate(self.rows))
        self.total = self.starts[-1]
        self._ranges: dict[str, tuple[int, int]] = {}
        self._runs: dict[tuple[str, ...], tuple[tuple[int, int], ...]] = {}
        self._segments: dict[tuple[str, ...], tuple[Segment, ...]] = {}

    def range(self, name: str) -> tuple[int, int]:
        """Rows of the piece or split called ``name``, in piece order."""
        found = self._ranges.get(name)
        if found is None:
            match = PIECE.match(name.partition("@")[0])
            assert match is not None, name
            owner, split = int(match[2]), int(match[3] or 0)
            start = self.starts[owner] + sum(split_sizes(self.rows[owner], self.splits)[:split])
            found = (start, start + split_sizes(self.rows[owner], self.splits)[split])
            self._ranges[name] = found
        return found

    def runs(self, names: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
        """The rows of the pieces ``names`` in piece order, adjacent ones joined: (start, stop)."""
        found = self._runs.get(names)
        if found is None:
            runs: list[tuple[int, int]] = []
            for start, stop in map(self.range, names):
                if runs and runs[-1][1] == start:
                    runs[-1] = (runs[-1][0], stop)
                else:
                    runs.append((start, stop))
            found = self._runs[names] = tuple(runs)
        return found

    def segments(self, names: tuple[str, ...]) -> tuple[Segment, ...]:
        """The rows of the pieces ``names``, in runs that are contiguous in both orders."""
        found = self._segments.get(names)
        if found is None:
            found = tuple(_merged(part for name in names for part in self._natural(*self.range(name))))
            self._segments[names] = found
        return found

    def _natural(self, start: int, stop: int) -> Iterator[Segment]:
        """Cuts rows of one piece where they stop being contiguous in natural order."""
        owner = max(rank for rank in range(len(self.owned)) if self.starts[rank] <= start)
        run = self.owned[owner] * self.inner
        stride, offset = sum(self.owned) * self.inner, sum(self.owned[:owner]) * self.inner
        while start < stop:
            outer, within = divmod(start - self.starts[owner], run)
            end = min(stop, start + run - within)
            yield Segment(start, end, outer * stride + offset + within)
            start = end

    def to_natural(self, pieces: torch.Tensor) -> torch.Tensor:
        """``[total, K]`` in piece order, brought into natural order (a copy only where they differ)."""
        if self.outer == 1:
            return pieces
        parts = [
            pieces[start : start + count].view(self.outer, owned * self.inner, pieces.shape[1])
            for start, count, owned in zip(self.starts, self.rows, self.owned, strict=False)
        ]
        return torch.cat(parts, dim=1).view(pieces.shape)

    def to_pieces(self, natural: torch.Tensor) -> torch.Tensor:
        """``[total, K]`` in natural order, brought into piece order (a copy only where they differ)."""
        if self.outer == 1:
            return natural
        parts = natural.unflatten(0, (self.outer, -1)).split([owned * self.inner for owned in self.owned], dim=1)
        return torch.cat([part.flatten(0, 1) for part in parts])


def _merged(segments: Iterator[Segment]) -> Iterator[Segment]:
    last: Segment | None = None
    for segment in segments:
        if last and segment.start == last.stop and segment.natural == last.natural + last.stop - last.start:
            last = Segment(last.start, segment.stop, last.natural)
            continue
        if last:
            yield last
        last = segment
    if last:
        yield last


@lru_cache(maxsize=256)
def layout(outer: int, owned: tuple[int, ...], inner: int, splits: int) -> Layout:
    """The (cached) Layout of these arguments."""
    return Layout(outer, owned, inner, splits)


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """The rows ``[rows, features]`` of a tensor ``[..., features]``, contiguous; a view where it can be."""
    return tensor.contiguous().view(prod(tensor.shape[:-1]), tensor.shape[-1])


def around(shape: Sequence[int], dim: int) -> tuple[int, int, int]:
    """Splits the sizes of all dimensions but the features into (outer, the one at ``dim``, inner)."""
    dim %= len(shape)
    return prod(shape[:dim]), shape[dim], prod(shape[dim + 1 : -1])
