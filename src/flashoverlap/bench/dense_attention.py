"""Attention as torch computes it, some queries at a time: what references are made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_QUERIES = 512  # at a time, so that a causal reference needs little memory


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: range, causal: bool, grad: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows ``[B, len(queries), H * D]`` of an attention, heads side by side.

    Args:
        q: queries ``[B, H, S, D]``, of all positions.
        k: keys ``[B, G, S, D]``.
        v: values ``[B, G, S, D]``.
        queries: positions whose rows are wanted.
        causal: whether each reads the keys up to its own position alone.
        grad: gradient of these rows, which is added to those of q, k and v.
    """
    found = []
    for start in range(queries.start, queries.stop, _QUERIES):
        stop = min(start + _QUERIES, queries.stop)
        end = stop if causal else k.shape[2]
        mask = None
        if causal:
            mask = torch.arange(end) <= torch.arange(start, stop)[:, None]
        rows = F.scaled_dot_product_attention(
            q[:, :, start:stop], k[:, :, :end], v[:, :, :end], attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
        )
        rows = rows.transpose(1, 2).flatten(2)
        if grad is not None:
            rows.backward(grad[:, start - queries.start : stop - queries.start])
        found.append(rows.detach())
    return torch.cat(found, 1)
