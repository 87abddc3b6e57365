"""The vocabulary over the ranks: the embedding that leads into the model and the head that leads out of it.

V entries, n ranks, rank r; ids [B, S], equal on all ranks
embedding   weight [V_r, K]: each rank looks up its own entries of all rows, and the sums are scattered to own rows
head        weight [V_r, K]: all rows of the own entries, ``logits [B, S, V_r]``, which are never gathered for a loss
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ..functional import all_reduce, reduce_scatter, split
from .lazy_rows import LazyRows
from .linear import Column, ColumnParallel, columns
from .parallel import Parallel, become, local, replaced
from .rows import LooksFull
from .sequence import check_alike, of_own_up
from .style import Style, shard


def own_entries(size: int, parallel: Parallel) -> range:
    """The entries of a vocabulary that are on this rank, by the rule of torch.chunk, as DTensor has it."""
    each = -(-size // parallel.world_size)
    first = min(parallel.rank * each, size)
    return range(first, min(first + each, size))


class Embedding(LooksFull):
    """An embedding of which each rank holds some entries."""

    _entries: range
    _size: int

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Own rows of the embedded ids (or all rows, without sequence parallelism)."""
        parallel = self._parallel
        _check_ids(ids, self._size, parallel)
        ids = of_own_up(ids, parallel)
        elsewhere = (ids < self._entries.start) | (ids >= self._entries.stop)
        here = (ids - self._entries.start).masked_fill(elsewhere, 0)
        with replaced({(self, "weight"): local(self.weight, parallel)}):  # pyright: ignore[reportArgumentType]
            partial = super().forward(here).masked_fill(elsewhere[..., None], 0.0)
        if not parallel.sequence_parallel:
            return all_reduce(partial, **parallel.call)
        return reduce_scatter(partial, **parallel.call)


def _check_ids(ids: torch.Tensor, size: int, parallel: Parallel) -> None:
    """Refuses ids that are out of range or differ between ranks, on every rank."""
    op = "VocabParallelEmbedding"

    def check() -> None:
        if ids.is_floating_point() or ids.is_complex():
            raise TypeError(f"{op}: ids are {ids.dtype}; whole numbers are needed")
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise IndexError(f"{op}: ids {int(ids.min())} to {int(ids.max())} with {size} entries")

    check_alike(op, "ids", ids, parallel, check)


class VocabParallelEmbedding(Style):
    """An nn.Embedding cut by entries; it takes all ids on every rank and gives own rows.

    Args:
        looks_full: its output goes to code that wants the shape of all rows (see lazy_rows.py).
    """

    def __init__(self, *, looks_full: bool = False) -> None:
        self.looks_full = looks_full

    def placements(self, module: nn.Module, name: str, parallel: Parallel) -> dict[str, Any]:
        if not isinstance(module, nn.Embedding):
            raise TypeError(f"{type(module).__qualname__} is no nn.Embedding")
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise ValueError(f"an embedding with {option}={getattr(module, option)} cannot be sharded")
        return {"weight": shard(module.weight.shape[0], 0, parallel, "vocabulary")}

    def apply(self, module: nn.Module, parallel: Parallel) -> None:
        assert isinstance(module, nn.Embedding)
        size = module.weight.shape[0]
        entries, padding = own_entries(size, parallel), module.padding_idx
        module.padding_idx = padding - entries.start if padding is not None and padding in entries else None
        looks_full = self.looks_full and parallel.sequence_parallel
        become(module, Embedding, parallel, _entries=entries, _size=size, _looks_full=looks_full)


class Head(Column):
    """A language model's head of which each rank holds some entries of the vocabulary."""

    _size: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., S, V]`` of all rows as a DTensor that is sharded by vocabulary; of the rows of the own up,
        where there is one."""
        parallel = self._parallel
        if parallel.up is not None and self._all_rows and not isinstance(x, LazyRows):
            x = split(x, **parallel.along(parallel.up))
        logits = columns(x, [self], self._all_rows)[0]
        if parallel.axes.tp_mesh is None:
            return logits
        size = torch.Size((*logits.shape[:-1], self._size))
        placement, stride = [Shard(logits.dim() - 1)], torch.empty(size, device="meta").stride()
        return DTensor.from_local(logits, parallel.axes.tp_mesh, placement, run_check=False, shape=size, stride=stride)


class VocabParallelHead(ColumnParallel):
    """The linear that ends a language model, cut by entries of the vocabulary.

    It gives logits of all rows as a DTensor, sharded by vocabulary, for
    :func:`~flashoverlap.torch.vocab_parallel_cross_entropy`; ``logits.full_tensor()`` gathers them.

    Args:
        all_rows: whether a plain tensor that it gets holds all rows, and not own rows, under sequence parallelism.
    """

    def __init__(self, *, all_rows: bool = False) -> None:
        super().__init__()
        self.all_rows = all_rows

    def apply(self, module: nn.Module, parallel: Parallel) -> None:
        weight: Any = module.weight
        size = weight.shape[0]
        become(module, Head, parallel, _transposed=False, _heads=(None,), _all_rows=self.all_rows, _size=size)
