"""Attention of some of the queries at a time, forward and backward, by kernels that are not ours.

Rows are queries of one sequence; out rows [rows, H * D] hold the heads side by side.

causal   queries start:stop read keys 0:start, all of them, and keys start:stop by the causal rule among themselves. Two
         such blocks of keys make one softmax: with l the log of a block's sum of exponentials, out = sum of
         out_i exp(l_i - l), and a block's backward needs out and l of all blocks together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

_aten = torch.ops.aten


class Heads(NamedTuple):
    """The tensors of an attention: q ``[B, H, S, D]``, k and v ``[B, G, T, D]``, G a divisor of H.

    Args:
        q: queries.
        k: keys.
        v: values.
        mask: None, or broadcastable to ``[B, H, S, T]``: bool (True takes part) or added to the scores.
        causal: whether query s reads keys up to s; S and T are equal then.
        scale: of the scores; None is ``D ** -0.5``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    scale: float | None


class Attend(ABC):
    """Attention by rows, and the gradients that come together from their backward passes."""

    def __init__(self, heads: Heads) -> None:
        self.heads = heads
        self.dq = self.dk = self.dv = torch.empty(0)

    @abstractmethod
    def rows(self, batch: int, start: int, stop: int) -> torch.Tensor:
        """Out rows of the queries ``start:stop`` of one sequence."""

    @abstractmethod
    def gradients(self, batch: int, start: int, stop: int, out: torch.Tensor, grad: torch.Tensor) -> None:
        """Adds what comes of the gradient of these out rows to dq, dk and dv."""

    def begin_backward(self) -> None:
        """Makes room for the gradients; those of k and v are sums, in float32 at least."""
        q, k, v = self.heads[:3]
        wide = torch.promote_types(q.dtype, torch.float32)
        self.dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
        self.dk, self.dv = (torch.zeros(each.shape, dtype=wide, device=each.device) for each in (k, v))

    @property
    def saved(self) -> tuple[torch.Tensor, ...]:
        """What backward needs beside q, k, v and out."""
        return ()


def attend(heads: Heads, saved: tuple[torch.Tensor, ...] = ()) -> Attend:
    """The kernel for these tensors; ``saved`` where it is for backward."""
    plain = heads.mask is None and heads.q.device.type == "cpu" and heads.q.shape[-1] == heads.v.shape[-1]
    return FlashCpu(heads, *saved) if plain and heads.k.shape[2] else Recomputed(heads)


class FlashCpu(Attend):
    """torch's flash kernel for CPUs, one call a block of keys."""

    def __init__(self, heads: Heads, lse: torch.Tensor | None = None) -> None:
        super().__init__(heads)
        wide = torch.promote_types(heads.q.dtype, torch.float32)
        self.lse = heads.q.new_empty(heads.q.shape[:3], dtype=wide) if lse is None else lse

    @property
    def saved(self) -> tuple[torch.Tensor, ...]:
        return (self.lse,)

    def _blocks(self, batch: int, start: int, stop: int) -> Iterator[tuple[range, bool, torch.Tensor, torch.Tensor]]:
        """Keys that these queries read, and whether by the causal rule; with their k and v."""
        _, k, v, _, causal, _ = self.heads
        blocks = [(range(k.shape[2]), False)]
        if causal:
            blocks = [(range(start), False)] * (start > 0) + [(range(start, stop), True)]
        for keys, rule in blocks:
            one = slice(batch, batch + 1), slice(None), slice(keys.start, keys.stop)
            yield keys, rule, k[one], v[one]

    def rows(self, batch: int, start: int, stop: int) -> torch.Tensor:
        q, scale = self.heads.q[batch : batch + 1, :, start:stop], self.heads.scale
        out = lse = None
        for _, rule, k, v in self._blocks(batch, start, stop):
            part, log = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, rule, scale=scale)
            if out is None or lse is None:
                out, lse = part, log
                continue
            both = torch.logaddexp(lse, log)
            out = out * (lse - both).exp()[..., None].to(out.dtype)
            out, lse = out.addcmul_(part, (log - both).exp()[..., None].to(out.dtype)), both
        assert out is not None
        assert lse is not None
        self.lse[batch, :, start:stop] = lse[0]
        return out[0].transpose(0, 1).flatten(1)

    def gradients(self, batch: int, start: int, stop: int, out: torch.Tensor, grad: torch.Tensor) -> None:
        q, scale = self.heads.q[batch : batch + 1, :, start:stop], self.heads.scale
        lse = self.lse[batch : batch + 1, :, start:stop]
        out, grad = (_by_head(each, q.shape[1]) for each in (out, grad))
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        for keys, rule, k, v in self._blocks(batch, start, stop):
            dq, dk, dv = backward(grad, q, k, v, out, lse, 0.0, rule, scale=scale)
            self.dq[batch, :, start:stop] += dq[0]
            self.dk[batch, :, keys.start : keys.stop] += dk[0]
            self.dv[batch, :, keys.start : keys.stop] += dv[0]


class Recomputed(Attend):
    """torch's scaled_dot_product_attention for whatever comes; backward computes the rows again."""

    def _attend(self, batch: int, start: int, stop: int) -> tuple[torch.Tensor, list[Any]]:
        q, k, v, mask, causal, scale = self.heads
        end = stop if causal else k.shape[2]
        leaves = [q[batch : batch + 1, :, start:stop], k[batch : batch + 1, :, :end], v[batch : batch + 1, :, :end]]
        leaves = [leaf.detach().requires_grad_(torch.is_grad_enabled()) for leaf in leaves]
        rule: Any = causal_lower_right(stop - start, end) if causal else None
        if mask is not None:
            wide = mask.expand(q.shape[0], mask.shape[1], q.shape[2], k.shape[2])
            rule = wide[batch : batch + 1, :, start:stop]
        out = F.scaled_dot_product_attention(*leaves, attn_mask=rule, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return out[0].transpose(0, 1).flatten(1), leaves

    def rows(self, batch: int, start: int, stop: int) -> torch.Tensor:
        return self._attend(batch, start, stop)[0]

    def gradients(self, batch: int, start: int, stop: int, out: torch.Tensor, grad: torch.Tensor) -> None:
        with torch.enable_grad():
            again, leaves = self._attend(batch, start, stop)
        dq, dk, dv = torch.autograd.grad(again, leaves, grad)
        self.dq[batch, :, start:stop] += dq[0]
        self.dk[batch, :, : dk.shape[2]] += dk[0]
        self.dv[batch, :, : dv.shape[2]] += dv[0]


def _by_head(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """``[rows, H * D]`` as ``[1, H, rows, D]``."""
    return rows.unflatten(1, (heads, -1)).transpose(0, 1)[None]
