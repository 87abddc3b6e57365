"""A tensor that looks like all rows of a sharded one, while only the own rows are here.

A model's own code asks its activations for their shape: to split heads, to build masks, to number positions. Those
answers must be those of the whole sequence, while the rows themselves are better gathered piece by piece by the linear
that reads them. So that code is handed this tensor. Linears of a plan know it and read the own rows; whoever else reads
it gathers them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..functional.exchange import all_gather
from .parallel import Parallel

_Tensor = torch.Tensor
# what tells nothing of the values
LOOKS = {
    getattr(_Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_meta", "is_sparse")
} | {_Tensor.size, _Tensor.dim, _Tensor.numel, _Tensor.is_floating_point, _Tensor.__len__, _Tensor.get_device}

_ALL = (slice(None), slice(0, None))


class LazyRows(torch.Tensor):
    """All rows ``[..., M, K]`` by their looks.

    Args:
        here: the own rows ``[..., M_r, K]``; without sequence parallelism all rows.
        rows: M.
        parallel: of the model.
        ready: outputs of linears that have read the rows already.
    """

    here: torch.Tensor
    ready: dict[nn.Module, torch.Tensor]
    _parallel: Parallel
    _all: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, here: torch.Tensor, rows: int, parallel: Parallel, ready: Mapping[nn.Module, torch.Tensor] | None = None
    ) -> LazyRows:
        size = (*here.shape[:-2], rows, here.shape[-1])
        made = torch.Tensor._make_wrapper_subclass(cls, size, dtype=here.dtype, device=here.device)
        made.here, made.ready = here, dict(ready or {})
        made._parallel, made._all = parallel, None if parallel.sequence_parallel else here
        return made

    def all(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The rows themselves, gathered when they are first asked for; their gradient must be equal on all ranks."""
        if self._all is None:
            self._all = all_gather(self.here, **self._parallel.call)
        return self._all

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in LOOKS or _keeps_shape(func, args):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {})) if func in LOOKS else args[0]
        there: Any = tree_map_only(LazyRows, LazyRows.all, (tuple(args), dict(kwargs or {})))
        return func(*there[0], **there[1])

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise RuntimeError(f"{func} came upon rows that are not here without torch having asked for them")


def _keeps_shape(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether this is a view, a reshape or a slice that leaves everything where it is."""
    if not args or not isinstance(args[0], LazyRows):
        return False
    if func is _Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(each is Ellipsis or (isinstance(each, slice) and each in _ALL) for each in index)
    if func not in (_Tensor.view, _Tensor.reshape) or isinstance(args[1], torch.dtype):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        like = torch.empty(args[0].shape, device="meta")
        return like.view(*args[1:]).shape == like.shape


def own_rows(x: Any) -> Any:
    """The own rows of rows that are here in part; anything else as it is."""
    return x.here if isinstance(x, LazyRows) else x
