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

from ..functional.attend import Heads
from .lazy import Lazy, shape_after

_Tensor = torch.Tensor


class LazyAttention(Lazy):
    """The output of an attention by its looks.

    Args:
        heads: the attention.
        form: "heads" ``[B, H, S, D]``, "rows" ``[B, S, H, D]`` or "flat" ``[B, S, H * D]``.
    """

    heads: Heads
    form: str
    _computed: torch.Tensor | None

    @staticmethod
    def __new__(cls, heads: Heads, form: str = "heads") -> LazyAttention:
        (batch, count, queries, _), features = heads.q.shape, heads.v.shape[-1]
        sizes = {
            "heads": (batch, count, queries, features),
            "rows": (batch, queries, count, features),
            "flat": (batch, queries, count * features),
        }
        made = _Tensor._make_wrapper_subclass(cls, sizes[form], dtype=heads.q.dtype, device=heads.q.device)
        made.heads, made.form, made._computed = heads, form, None
        return made

    def all(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The values, computed when they are first asked for."""
        if self._computed is None:
            q, k, v, mask, causal, scale = self.heads
            grouped = q.shape[1] != k.shape[1]
            with computing():
                out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
            rows = out if self.form == "heads" else out.transpose(1, 2)
            self._computed = rows.flatten(2) if self.form == "flat" else rows
        return self._computed

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

    Attributes:
        count: how many were.
        refusals: why others were not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.refusals: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and not _computing.get():
            heads, refusal = _heads(*args, **(kwargs or {}))
            if heads is not None:
                self.count += 1
                return LazyAttention(heads)
            self.refusals.append(refusal)
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
) -> tuple[Heads | None, str]:
    """An attention that can be cut by queries, or why it cannot."""
    if dropout_p:
        return None, f"dropout of {dropout_p}"
    if query.dim() != 4 or key.dim() != 4 or key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0]:
        sizes = ", ".join(str(list(each.shape)) for each in (query, key, value))
        return None, f"tensors {sizes} that are not [B, H, S, D] and [B, G, T, D]"
    if query.shape[1] % key.shape[1]:
        return None, f"{query.shape[1]} query and {key.shape[1]} key heads"
    if is_causal and query.shape[2] != key.shape[2]:
        return None, f"{query.shape[2]} causal queries of {key.shape[2]} keys"
    if attn_mask is not None and (is_causal or attn_mask.dim() != 4 or attn_mask.requires_grad):
        return None, f"a mask {list(attn_mask.shape)} of its own kind"
    full = (*query.shape[:3], key.shape[2])
    if attn_mask is not None and any(have not in (1, want) for have, want in zip(attn_mask.shape, full, strict=True)):
        return None, f"a mask {list(attn_mask.shape)} for scores {list(full)}"
    if query.shape[1] != key.shape[1] and not enable_gqa:
        return None, f"{query.shape[1]} query and {key.shape[1]} key heads without enable_gqa"
    return Heads(query, key, value, attn_mask, is_causal, scale), ""
