"""Slices as people write them by hand: of heads, or of sequences; the collectives of one fly while others compute."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..patterns import split_sizes
from ..torch.functional.shares import tensor_split
from .all_to_all import AllToAll, Waits
from .contestant import Contestant


class SliceOfHeads(NamedTuple):
    """Some of a rank's heads.

    Attributes:
        heads: those that attend in it.
        kv_heads: those that come with it; none where the slice before has brought the one that is read here.
    """

    heads: range
    kv_heads: range


def cut(whole: range, parts: int) -> list[range]:
    """Nearly equal parts of a range, one after another; none of no parts."""
    return [whole[part.start : part.stop] for part in tensor_split(len(whole), parts)] if parts else []


def slices_of_heads(kv_heads: range, readers: int, count: int) -> list[SliceOfHeads]:
    """``count`` slices of a rank's heads, empty ones last: of whole kv heads, or of the readers of one of them.

    Args:
        kv_heads: those of the rank.
        readers: heads that read one of them.
        count: slices; more than the rank has heads are empty.
    """
    some = min(count, len(kv_heads) * readers)
    if some <= len(kv_heads):
        found = [SliceOfHeads(range(part.start * readers, part.stop * readers), part) for part in cut(kv_heads, some)]
    else:
        found = [
            SliceOfHeads(heads, range(kv_head, kv_head + (place == 0)))
            for kv_head, parts in zip(kv_heads, split_sizes(some, len(kv_heads)), strict=True)
            for place, heads in enumerate(cut(range(kv_head * readers, (kv_head + 1) * readers), parts))
        ]
    return found + [SliceOfHeads(range(0), range(0))] * (count - some)


class Sliced(Contestant):
    """A case in slices, by all-to-alls of torch.distributed.

    Args:
        case: whose leaves are used.
        group: the process group.
        count: slices; no more are made than the shape has.
        what: is cut, in the plural.
    """

    def __init__(self, case: Any, group: Any, count: int, what: str) -> None:
        self.leaves = case.leaves
        count = min(count, case.shape.most_slices(case.world_size))
        self.detail = f"{count} {'slices' if count > 1 else 'slice'} of {what}"
        self._case, self._group, self._count = case, group, count
        self._rows = split_sizes(case.shape.seq, case.world_size)
        self._waits = Waits()

    def run(self, grad: torch.Tensor | None) -> torch.Tensor:
        """One pass."""
        self._waits.seconds = 0.0
        return super().run(grad)

    def blocked_s(self) -> float | None:
        """What the last run has waited for its collectives."""
        return self._waits.seconds

    def _start(self, flat: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> AllToAll:
        return AllToAll(self._group, sent, received, self._waits).start(flat)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention ``[B, S, H * D]`` of q ``[B, H, S, D]``, k and v ``[B, G, S, D]``; of no heads, nothing."""
        if q.shape[1]:
            grouped = q.shape[1] != k.shape[1]
            q = F.scaled_dot_product_attention(q, k, v, is_causal=self._case.shape.causal, enable_gqa=grouped)
        return q.transpose(1, 2).flatten(2)

    def _to_owners(self, rows: torch.Tensor) -> torch.Tensor:
        """All rows ``[B, S, features]``, flat, those of a rank beside each other."""
        if rows.shape[0] == 1:
            return rows.flatten()
        return torch.cat([part.flatten() for part in rows.split(self._rows, 1)])

    def _from_owners(self, flat: torch.Tensor, features: int) -> torch.Tensor:
        """All rows ``[B, S, features]`` of such."""
        batch = self._case.shape.batch
        if batch == 1:
            return flat.view(1, sum(self._rows), features)
        parts = flat.split([batch * rows * features for rows in self._rows])
        return torch.cat([part.view(batch, rows, features) for part, rows in zip(parts, self._rows, strict=True)], 1)


class SlicedUlysses(Sliced):
    """Ulysses attention, some heads of every rank at a time: an all-to-all in front of attention, and one behind."""

    def __init__(self, case: Any, group: Any, count: int) -> None:
        shape = case.shape
        readers = shape.heads // shape.kv_heads
        super().__init__(case, group, count, "heads")
        count = self._count
        slices = [slices_of_heads(kv_heads, readers, count) for kv_heads in case.kv_heads]
        # by slice and rank, the features of the heads that attend, and of those that come with them
        self._queries = [[len(one.heads) * shape.head_dim for one in ranks] for ranks in zip(*slices, strict=True)]
        self._keys = [[len(one.kv_heads) * shape.head_dim for one in ranks] for ranks in zip(*slices, strict=True)]
        pairs = (zip(*both, strict=True) for both in zip(self._queries, self._keys, strict=True))
        self._brought = [[queries + 2 * keys for queries, keys in pair] for pair in pairs]

    def forward(self) -> torch.Tensor:
        """Own rows of the output."""
        to_heads = [self._project(place, weight) for place, weight in enumerate(self._projections())]
        to_rows = []
        k = v = self.leaves["x"].new_empty(0)
        for place, flying in enumerate(to_heads):
            q, brought_k, brought_v = self._own_heads(place, flying.arrived())
            if brought_k.shape[1]:
                k, v = brought_k, brought_v
            by_rows, by_heads = self._elements(self._queries[place])
            to_rows.append(self._start(self._to_owners(self._attend(q, k, v)), by_rows, by_heads))
        columns = self._by_slice("wo", self._queries, 1)
        return reduce(
            torch.add,  # before the next slice is waited for
            (
                F.linear(self._own_rows(place, flying.arrived()), torch.cat(columns[place], 1))
                for place, flying in enumerate(to_rows)
            ),
        )

    def _elements(self, features: Sequence[int]) -> tuple[list[int], list[int]]:
        """Of own heads, the elements of each rank's rows, and of own rows, those of each rank's heads."""
        rank, batch = self._case.rank, self._case.shape.batch
        return (
            [batch * rows * features[rank] for rows in self._rows],
            [batch * self._rows[rank] * each for each in features],
        )

    def _by_slice(self, name: str, features: Sequence[Sequence[int]], dim: int) -> list[list[torch.Tensor]]:
        """By slice and rank, the parts of a weight that belong to their heads."""
        sizes = [each[rank] for rank in range(self._case.world_size) for each in features]
        parts = self.leaves[name].split(sizes, dim)  # once, so that its gradient is put together once
        return [list(parts[place :: self._count]) for place in range(self._count)]

    def _projections(self) -> list[torch.Tensor]:
        """By slice, the weights of its queries, keys and values, those for one rank beside each other."""
        wq = self._by_slice("wq", self._queries, 0)
        wk, wv = (self._by_slice(name, self._keys, 0) for name in ("wk", "wv"))
        return [torch.cat([*chain.from_iterable(zip(*of, strict=True))]) for of in zip(wq, wk, wv, strict=True)]

    def _project(self, place: int, weight: torch.Tensor) -> AllToAll:
        """Starts the queries, keys and values of a slice on their way from own rows to the ranks of their heads."""
        features = self._brought[place]
        by_rows, by_heads = self._elements(features)
        parts = F.linear(self.leaves["x"], weight).split(features, -1)
        return self._start(torch.cat([part.flatten() for part in parts]), by_heads, by_rows)

    def _own_heads(self, place: int, flat: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values ``[B, heads, S, D]`` of own heads, of all rows."""
        rank, each = self._case.rank, self._case.shape.head_dim
        features = [self._queries[place][rank], self._keys[place][rank], self._keys[place][rank]]
        parts = self._from_owners(flat, sum(features)).split(features, -1)
        return [part.unflatten(-1, (part.shape[-1] // each, each)).transpose(1, 2) for part in parts]

    def _own_rows(self, place: int, flat: torch.Tensor) -> torch.Tensor:
        """Attention ``[B, S_r, features]`` of own rows, of a slice of all ranks' heads."""
        batch, own = self._case.shape.batch, self._rows[self._case.rank]
        widths = self._queries[place]
        parts = flat.split([batch * own * width for width in widths])
        return torch.cat([part.view(batch, own, width) for part, width in zip(parts, widths, strict=True)], -1)


class SlicedSequences(Sliced):
    """Attention, output projection and the scatter of its rows, some sequences at a time.

    The reduce-scatter is an all-to-all of partial rows and a sum, which on gloo moves half the bytes of its own
    reduce-scatter; backward, the all-to-all hands every rank the same rows.
    """

    def __init__(self, case: Any, group: Any, count: int) -> None:
        super().__init__(case, group, count, "sequences")
        self._sequences = split_sizes(case.shape.batch, self._count)

    def forward(self) -> torch.Tensor:
        """Own rows of the output."""
        *heads, weight = (self.leaves[name] for name in ("q", "k", "v", "weight"))
        under_way = []
        for q, k, v in zip(*(each.split(self._sequences) for each in heads), strict=True):
            under_way.append(self._scatter(F.linear(self._attend(q, k, v), weight)))
        flown = zip(under_way, self._sequences, strict=True)
        return torch.cat([self._summed(flying.arrived(), batch) for flying, batch in flown])

    def _scatter(self, partial: torch.Tensor) -> AllToAll:
        """Starts partial rows ``[b, S, N]`` on their way to their owners."""
        row = partial.shape[0] * partial.shape[2]
        sent = [rows * row for rows in self._rows]
        return self._start(self._to_owners(partial), sent, [sent[self._case.rank]] * len(sent))

    def _summed(self, flat: torch.Tensor, batch: int) -> torch.Tensor:
        """Own rows ``[b, S_r, N]`` of what all ranks have sent."""
        return flat.view(len(self._rows), batch, self._rows[self._case.rank], self._case.shape.hidden).sum(0)
