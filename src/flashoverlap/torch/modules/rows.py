"""Modules that keep their parameters whole: on own rows, on all rows, and where all rows become own rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...report import placed
from .lazy_rows import LazyRows, all_rows, own_rows
from .parallel import Parallel, Parallelized, become, replaced, whole
from .random import of_all_ranks, of_this_rank
from .sequence import count_rows, split_rows
from .style import Style, replicated


class LooksFull(Parallelized):
    """A module that gives own rows, to code that may want them to look like all rows."""

    _looks_full: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """After the module's own hooks, which see ordinary tensors ([Note: lazy tensors])."""
        out = super().__call__(*args, **kwargs)
        if not self._looks_full:
            return out
        with placed(self._path):
            return LazyRows(out, count_rows(out, self._parallel), self._parallel)


class Whole(LooksFull):
    """A module whose parameters are whole on every rank."""

    takes_one = False

    _summed: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module does: on own rows where each rank is to see its own, or else on all rows."""
        rows = own_rows if self._summed else all_rows
        here = {
            (module, name): whole(getattr(module, name), self._parallel, self._summed)  # which data_parallel may change
            for module in self.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        with replaced(here):
            return super().forward(*map(rows, args), **{name: rows(arg) for name, arg in kwargs.items()})


def become_whole(module: nn.Module, parallel: Parallel, *, summed: bool, looks_full: bool = False) -> None:
    """Keeps a module's parameters whole; with ``summed`` their gradients are sums over the ranks."""
    become(module, Whole, parallel, _summed=summed, _looks_full=looks_full)


class SequenceParallel(Style):
    """A module that works row by row on own rows (a norm, say): its gradients are summed over the ranks.

    Without sequence parallelism it works on all rows, and nothing has to be summed.

    Args:
        looks_full: its output goes to code that wants the shape of all rows (see lazy_rows.py).
    """

    def __init__(self, *, looks_full: bool = False) -> None:
        self.looks_full = looks_full

    def placements(self, module: nn.Module, name: str, parallel: Parallel) -> dict[str, Any]:
        return replicated(module)

    def apply(self, module: nn.Module, parallel: Parallel) -> None:
        sharded = parallel.sequence_parallel
        become_whole(module, parallel, summed=sharded, looks_full=self.looks_full and sharded)


class Replicated(Style):
    """A module that computes the same on every rank, from what is the same on every rank."""

    def placements(self, module: nn.Module, name: str, parallel: Parallel) -> dict[str, Any]:
        return replicated(module)

    def apply(self, module: nn.Module, parallel: Parallel) -> None:
        become_whole(module, parallel, summed=False)
        same_dropout(module, parallel)


class SameDropout(Parallelized):
    """Dropout on what all ranks hold alike: by the mask that they all draw."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drops features by the ordinary stream of random numbers."""
        with of_all_ranks(self._parallel, x.device):
            return super().forward(x)


def same_dropout(module: nn.Module, parallel: Parallel) -> None:
    """Makes every dropout below a module one that is equal on all ranks."""
    for child in list(module.modules()):
        if isinstance(child, nn.modules.dropout._DropoutNd) and not isinstance(child, Parallelized):
            become(child, SameDropout, parallel)


class _Split(Parallelized):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Before the module's own hooks and checkpoints, which then see ordinary tensors of own rows."""
        x, *rest = args or (kwargs.pop("hidden_states"),)
        with placed(self._path):
            own = x.here if isinstance(x, LazyRows) else split_rows(x, self._parallel)
        with of_this_rank(self._parallel, own.device, _draws(self)):
            return super().__call__(own, *rest, **kwargs)


class ShardedInput(Style):
    """A module without parameters of its own style, with which the sharded region begins: of all rows it takes its own.

    Without sequence parallelism nothing changes.
    """

    def placements(self, module: nn.Module, name: str, parallel: Parallel) -> dict[str, Any]:
        return {}

    def apply(self, module: nn.Module, parallel: Parallel) -> None:
        if parallel.sequence_parallel:
            become(module, _Split, parallel)


class Dropped(Parallelized):
    """Dropout on a part (own rows) or, where all rows are everywhere, on the same of all ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drops features by a mask of this rank's own."""
        with of_this_rank(self._parallel, x.device, _draws(self)):
            return super().forward(x)


def _draws(module: nn.Module) -> bool:
    return module.training and isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
