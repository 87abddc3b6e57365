"""Attention put off until the output projection reads it, so that both are cut by queries and hide what follows.

A model's own code calls ``scaled_dot_product_attention``, brings the result into rows, and hands them to the output
projection. Between, nobody looks at the values. So the call is answered by a tensor that only knows its shape; the
projection, being row-parallel, then runs attention and projection piece by piece. Whoever else reads it gets the
values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ..functional.attend import Heads
from .lazy_rows import LOOKS

_Tensor = torch.Tensor


class LazyAttention(torch.Tensor):
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
            out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
            rows = out if self.form == "heads" else out.transpose(1, 2)
            self._computed = rows.flatten(2) if self.form == "flat" else rows
        return self._computed

    def _as(self, form: str) -> LazyAttention:
        return self if form == self.form else LazyAttention(self.heads, form)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        form = _new_form(func, args) if isinstance(args[0], LazyAttention) and not kwargs else None
        if form is not None:
            return args[0]._as(form)
        there: Any = tree_map_only(LazyAttention, LazyAttention.all, (tuple(args), dict(kwargs or {})))
        return func(*there[0], **there[1])

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise RuntimeError(f"{func} came upon an attention that is put off without torch having asked for it")


def _new_form(func: Callable[..., Any], args: Sequence[Any]) -> str | None:
    """The form that a change of shape leads to, or None where it is another or no such change."""
    form: str = args[0].form
    with torch._C.DisableTorchFunctionSubclass():
        size = args[0].shape
        if func is _Tensor.contiguous:
            return form
        if func in (_Tensor.transpose, torch.transpose) and form != "flat" and {args[1] % 4, args[2] % 4} == {1, 2}:
            return "rows" if form == "heads" else "heads"
        if func in (_Tensor.reshape, _Tensor.view, _Tensor.flatten, torch.reshape, torch.flatten):
            if isinstance(args[1], torch.dtype):
                return None
            after = func(torch.empty(size, device="meta"), *args[1:]).shape
            if after == size:
                return form
            return "flat" if form == "rows" and after == (*size[:2], size[2] * size[3]) else None
    return None


class PutOff(TorchFunctionMode):
    """Within, every scaled_dot_product_attention that can be cut by queries is put off.

    Attributes:
        refusals: why others were not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refusals: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            heads, refusal = _heads(*args, **(kwargs or {}))
            if heads is not None:
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
    if query.dim() != 4 or key.dim() != 4:
        return None, f"queries {list(query.shape)} that are not [B, H, S, D]"
    if is_causal and query.shape[2] != key.shape[2]:
        return None, f"{query.shape[2]} causal queries of {key.shape[2]} keys"
    if attn_mask is not None and (is_causal or attn_mask.dim() != 4 or attn_mask.requires_grad):
        return None, f"a mask {list(attn_mask.shape)} of its own kind"
    if query.shape[1] != key.shape[1] and not enable_gqa:
        return None, f"{query.shape[1]} query and {key.shape[1]} key heads without enable_gqa"
    return Heads(query, key, value, attn_mask, is_causal, scale), ""
