"""A tensor that looks like all rows of a sharded one, while only the own rows are here.

A model's own code asks its activations for their shape: to split heads, to build masks, to number positions. Those
answers must be those of the whole sequence, while the rows themselves are better gathered piece by piece by the linear
that reads them. So that code is handed this tensor. Linears of a plan know it and read the own rows; whoever else reads
it gathers them, which all ranks must do alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .lazy import Lazy
from .parallel import Parallel
from .sequence import gather_rows, summed_over_all


class LazyRows(Lazy):
    """All rows ``[..., M, K]`` by their looks.

    Args:
        here: the own rows ``[..., M_r, K]``; without sequence parallelism all rows.
        rows: M.
        parallel: of the model.
        ready: outputs of linears that have read the rows already.
        partial: whether those who read it see a part on each rank (own heads), so that their gradients are summed;
            otherwise they must compute the same on every rank.
    """

    here: torch.Tensor
    ready: dict[nn.Module, torch.Tensor]
    _parallel: Parallel
    _partial: bool

    @staticmethod
    def __new__(
        cls,
        here: torch.Tensor,
        rows: int,
        parallel: Parallel,
        ready: Mapping[nn.Module, torch.Tensor] | None = None,
        partial: bool = False,
    ) -> LazyRows:
        size = (*here.shape[:-2], rows, here.shape[-1])
        made = torch.Tensor._make_wrapper_subclass(cls, size, dtype=here.dtype, device=here.device)
        made.here, made.ready = here, dict(ready or {})
        made._parallel, made._partial = parallel, partial
        return made

    def _made(self) -> torch.Tensor:
        rows = gather_rows(self.here, self._parallel) if self._parallel.sequence_parallel else self.here
        return summed_over_all(rows, self._parallel) if self._partial else rows


def own_rows(x: Any) -> Any:
    """The own rows of rows that are here in part; anything else as it is."""
    return x.here if isinstance(x, LazyRows) else x


def all_rows(x: Any) -> Any:
    """All rows of rows that are here in part; anything else as it is."""
    return x.all() if isinstance(x, LazyRows) else x
