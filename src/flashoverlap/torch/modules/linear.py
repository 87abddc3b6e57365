"""Linears whose weights are sharded: by output features before the work of a rank, by input features after it.

    column-parallel   weight [N_r, K] on rank r   own rows [..., M_r, K]  ->  all rows [..., M, N_r]
    row-parallel      weight [N, K_r] on rank r   all rows [..., M, K_r]  ->  own rows [..., M_r, N]

Without sequence parallelism every rank holds all rows outside, and there is an all-reduce in place of the pair.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from ..functional import (
    all_gather_linear,
    all_reduce_grad_linear,
    linear_all_reduce,
    linear_reduce_scatter,
)
from ..functional.attention import attention_by_queries
from .lazy import Lazy
from .lazy_attention import LazyAttention, computing
from .lazy_rows import LazyRows, own_rows
from .parallel import Parallel, Parallelized, become, local, whole
from .style import Parts, Style, shard

_LOOKS_FUSED = re.compile(r"(qkv|c_attn|query_key_value|in_proj|gate_up|w_?pack|up_gate)", re.IGNORECASE)


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear keeps its weight as [in, out]: transformers' Conv1D.

    Raises:
        TypeError: this is no linear that can be sharded.
    """
    plain = type(module).forward is nn.Linear.forward
    conv1d = type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    if not plain and not conv1d:
        raise TypeError(
            f"{type(module).__module__}.{type(module).__qualname__} is neither an nn.Linear nor transformers' Conv1D; "
            "only these can be sharded (give a wrapper's inner linears a style each)"
        )
    return conv1d


class Column(Parallelized):
    """A column-parallel linear."""

    _transposed: bool
    _heads: Sequence[range | None]  # by part, the own features of a replicated one
    _all_rows: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All rows of the own features, of own rows (or of all, without sequence parallelism)."""
        if isinstance(x, LazyRows) and self in x.ready:
            return x.ready.pop(self)
        if isinstance(x, LazyRows) and self._parallel.up is not None:
            raise RuntimeError(f"{self._path} reads all rows of a sequence, of which each rank of up has some only")
        return columns(x, [self], self._all_rows)[0]

    def shard(self, name: str) -> torch.Tensor | None:
        """The own part of the weight ``[N_r, K]`` or bias ``[N_r]``."""
        parts: list[Any] = self.parts(name)
        return parts[0] if len(parts) == 1 else None if parts[0] is None else torch.cat(parts)

    def parts(self, name: str) -> list[torch.Tensor | None]:
        """The same, by what lies side by side in it."""
        held: Any = getattr(self, name)
        if held is None:
            return [None] * len(self._heads)
        turned = self._transposed and name == "weight"
        parts = list(held) if isinstance(held, nn.ParameterList) else [held]
        own = [self._own(part, heads, int(turned)) for part, heads in zip(parts, self._heads, strict=True)]
        return [part.t() if turned else part for part in own]

    def _own(self, part: torch.Tensor, heads: range | None, dim: int) -> torch.Tensor:
        if heads is None:
            return local(part, self._parallel)
        return whole(part, self._parallel, summed=True).narrow(dim, heads.start, len(heads))


def columns(x: torch.Tensor, linears: Sequence[Column], all_rows: bool = False) -> tuple[torch.Tensor, ...]:
    """What several column-parallel linears make of the same rows: gathered once, or summed once in backward.

    ``all_rows`` says that a plain tensor holds all rows even under sequence parallelism.
    """
    parallel = linears[0]._parallel
    weights: list[Any] = [linear.shard("weight") for linear in linears]
    biases = [linear.shard("bias") for linear in linears]
    sharded = parallel.sequence_parallel and (isinstance(x, LazyRows) or not all_rows)
    operator = all_gather_linear if sharded else all_reduce_grad_linear
    return tuple(operator(own_rows(x), weights, biases, **parallel.call))


class ColumnParallel(Style):
    """An nn.Linear (or Conv1D) cut by output features; it reads own rows and gives all rows of its features.

    Args:
        parts: sizes of what lies side by side in a fused weight, as in ``(heads * d, kv_heads * d, kv_heads * d)`` or
            ``(ffn, ffn)``: each is cut by itself. ``(out_features,)`` says that a weight is not fused although its
            name sounds so.

    Raises:
        ValueError: when the plan is applied, for parts that do not add up, or a name that sounds fused without them.
    """

    _all_rows = False

    def __init__(self, parts: Sequence[int] | None = None) -> None:
        self.parts = None if parts is None else tuple(parts)

    def placements(self, module: nn.Module, name: str, parallel: Parallel) -> dict[str, Any]:
        if self.parts is None and _LOOKS_FUSED.search(name.rpartition(".")[2]):
            raise ValueError("the name sounds like several weights in one; give ColumnParallel(parts=...) their sizes")
        return column_placements(module, parallel, self.parts, [None] * len(self.parts or (0,)))

    def apply(self, module: nn.Module, parallel: Parallel) -> None:
        become_column(module, parallel, [None] * len(self.parts or (0,)), all_rows=self._all_rows)


def column_placements(
    module: nn.Module, parallel: Parallel, parts: Sequence[int] | None, heads: Sequence[range | None]
) -> dict[str, Any]:
    """Placements of a column-parallel linear, of which the parts with ``heads`` are whole on every rank."""
    dim = 1 if is_transposed(module) else 0
    names = [name for name, _ in module.named_parameters(recurse=False)]
    weight: Any = module.weight
    if parts is not None and sum(parts) != weight.shape[dim]:
        raise ValueError(f"parts {parts} are {sum(parts)} in all, and the linear has {weight.shape[dim]} outputs")

    def placement(size: int, dim: int, own: range | None) -> Any:
        return Replicate() if own is not None else shard(size, dim, parallel, "output features")

    found = {}
    for name in names:
        at = dim if name == "weight" else 0
        if parts is None or len(parts) == 1:
            found[name] = placement(weight.shape[dim], at, heads[0])
        else:
            placed = tuple(placement(size, at, own) for size, own in zip(parts, heads, strict=True))
            found[name] = Parts(at, tuple(parts), placed)
    return found


def become_column(
    module: nn.Module, parallel: Parallel, heads: Sequence[range | None], *, all_rows: bool = False
) -> None:
    """Makes a linear column-parallel; see :func:`column_placements`."""
    turned = is_transposed(module)
    become(module, Column, parallel, _transposed=turned, _heads=tuple(heads), _all_rows=all_rows)


class Row(Parallelized):
    """A row-parallel linear."""

    _transposed: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Own rows of the sum over ranks (or all rows, without sequence parallelism)."""
        call = self._parallel.call
        if isinstance(x, LazyAttention) and x.form == "flat" and self._parallel.sequence_parallel:
            with computing():
                return attention_by_queries(x.heads, self.shard(), self.replicated_bias(), **call)
        operator = linear_reduce_scatter if self._parallel.sequence_parallel else linear_all_reduce
        return operator(x.all() if isinstance(x, Lazy) else x, self.shard(), self.replicated_bias(), **call)

    def shard(self) -> torch.Tensor:
        """The own part of the weight, ``[N, K_r]``."""
        weight = local(self.weight, self._parallel)  # pyright: ignore[reportArgumentType]
        return weight.t() if self._transposed else weight

    def replicated_bias(self) -> torch.Tensor | None:
        """The bias ``[N]``; its gradient is that of all rows on every rank."""
        return None if self.bias is None else local(self.bias, self._parallel)  # pyright: ignore[reportArgumentType]


class RowParallel(Style):
    """An nn.Linear (or Conv1D) cut by input features; it reads all rows of its features and gives own rows."""

    def placements(self, module: nn.Module, name: str, parallel: Parallel) -> dict[str, Any]:
        dim = 0 if is_transposed(module) else 1
        weight: Any = module.weight
        found: dict[str, Any] = {name: Replicate() for name, _ in module.named_parameters(recurse=False)}
        return found | {"weight": shard(weight.shape[dim], dim, parallel, "input features")}

    def apply(self, module: nn.Module, parallel: Parallel) -> None:
        become(module, Row, parallel, _transposed=is_transposed(module))
