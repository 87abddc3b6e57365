"""Logits at the end of a language model, of which each rank has some: rows of its up, entries of its tp."""

from __future__ import annotations

import torch

from ..functional import all_gather
from .lazy import Lazy
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

    @staticmethod
    def __new__(cls, here: torch.Tensor, parallel: Parallel) -> LazyLogits:
        size = (*here.shape[:-2], count_rows_of_up(here, parallel), here.shape[-1])
        made = torch.Tensor._make_wrapper_subclass(cls, size, dtype=here.dtype, device=here.device)
        made.here, made._parallel = here, parallel
        return made

    def _made(self) -> torch.Tensor:
        return whole_logits(self.here, self._parallel)
