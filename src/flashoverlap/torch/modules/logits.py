"""Logits at the end of a language model, of which each rank has some: rows of its up, entries of its tp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..functional import all_gather
from .lazy import Lazy, shape_after
from .parallel import Parallel, whole_value
from .sequence import count_rows_of_up


def whole_logits(logits: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """Logits ``[B, S, V]`` of all rows and entries, on every rank."""
    entries = whole_value(logits)
    return entries if parallel.up is None else all_gather(entries, **parallel.along(parallel.up))


class LazyLogits(Lazy):
    """Logits ``[B, S, V]`` by their looks, of which the rows of the own up are here; whoever reads them gathers them.

    Args:
        here: ``[B, S_u, V]``, a DTensor where the vocabulary is sharded.
        parallel: of the model.
    """

    here: torch.Tensor
    _parallel: Parallel
    _all: torch.Tensor | None

    @staticmethod
    def __new__(cls, here: torch.Tensor, parallel: Parallel) -> LazyLogits:
        size = (*here.shape[:-2], count_rows_of_up(here, parallel), here.shape[-1])
        made = torch.Tensor._make_wrapper_subclass(cls, size, dtype=here.dtype, device=here.device)
        made.here, made._parallel, made._all = here, parallel, None
        return made

    def all(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The logits themselves, gathered when they are first asked for."""
        if self._all is None:
            self._all = whole_logits(self.here, self._parallel)
        return self._all

    def reshaped(self, func: Callable[..., Any], args: Sequence[Any]) -> LazyLogits | None:
        """Itself, where nothing changes."""
        return self if shape_after(func, self.shape, args[1:]) == self.shape else None
