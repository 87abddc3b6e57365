"""Attention put off until the output projection reads it, so that both are cut by queries and hide what follows.

A model's own code calls ``scaled_dot_product_attention``, brings the result into rows, and hands them to the output
projection. Between, nobody looks at the values. So the call is answered by a tensor that only knows its shape; the
projection, being row-parallel, then runs attention and projection piece by piece. Whoever else reads it gets the
values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ..check import autocast, check_tensors
from ..functional.attend import Heads, attention
from ..functional.scores import Scores, check_attention
from .lazy import Lazy, shape_after

_Tensor = torch.Tensor
_OP = "scaled_dot_product_attention"


class LazyAttention(Lazy):
    """The output of an attention by its looks.

    Args:
        heads: the attention.
        form: "heads" ``[B, H, S, D]``, "rows" ``[B, S, H, D]`` or "flat" ``[B, S, H * D]``.
    """

    heads: Heads
    form: str

    @staticmethod
    def __new__(cls, heads: Heads, form: str = "heads") -> LazyAttention:
        (batch, count, queries, _), features = heads.q.shape, heads.v.shape[-1]
        sizes = {
            "heads": (batch, count, queries, features),
            "rows": (batch, queries, count, features),
            "flat": (batch, queries, count * features),
        }
        made = _Tensor._make_wrapper_subclass(cls, sizes[form], dtype=heads.q.dtype, device=heads.q.device)
        made.heads, made.form = heads, form
        return made

    def _made(self) -> torch.Tensor:
        with computing():
            out = attention(self.heads)
        rows = out if self.form == "heads" else out.transpose(1, 2)
        return rows.flatten(2) if self.form == "flat" else rows

    def _as(self, form: str) -> LazyAttention:
        return self if form == self.form else LazyAttention(self.heads, form)

    def reshaped(self, func: Callable[..., Any], args: Sequence[Any]) -> LazyAttention | None:
        """The other forms."""
        if (
            func in (_Tensor.transpose, torch.transpose)
            and self.form != "flat"
            and {args[1] % 4, args[2] % 4} == {1, 2}
        ):
            return self._as("rows" if self.form == "heads" else "heads")
        after = shape_after(func, self.shape, args[1:])
        if after == self.shape:
            return self
        flat = self.form == "rows" and after == (*self.shape[:2], self.shape[2] * self.shape[3])
        return self._as("flat") if flat else None


_computing: ContextVar[bool] = ContextVar("computing", default=False)


@contextmanager
def computing() -> Iterator[None]:
    """Within, attention is what it is: the library computes what it has put off."""
    token = _computing.set(True)
    try:
        yield
    finally:
        _computing.reset(token)


class PutOff(TorchFunctionMode):
    """Within, every scaled_dot_product_attention that can be cut by queries is put off.

    Args:
        rank: whose heads these are: dropout differs from rank to rank.

    Attributes:
        count: how many were.
        refusals: why others were not.
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank
        self.count = 0
        self.refusals: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and not _computing.get():
            try:
                heads = _heads(*args, **(kwargs or {}))
            except (TypeError, ValueError) as refusal:
                self.refusals.append(str(refusal))
            else:
                self.count += 1
                return LazyAttention(heads._replace(scores=heads.scores.drawn(self.rank)))
        return func(*args, **(kwargs or {}))


def _heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Heads:
    """An attention that can be cut by queries; TypeError or ValueError for another."""
    cast: list[Any] = autocast(query, key, value)
    q, k, v = cast
    scores = Scores(attn_mask, is_causal, dropout=dropout_p, scale=scale)
    check_tensors(_OP, q, (k, v), called="q")
    check_attention(_OP, q, k, v, scores)
    if is_causal and attn_mask is not None:
        raise ValueError(f"{_OP}: is_causal goes without a mask")
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ValueError(f"{_OP}: {q.shape[1]} query and {k.shape[1]} key heads without enable_gqa")
    return Heads(q, k, v, scores)
