"""Query-split attention under tensor and sequence parallelism: all rows of own heads in, own rows out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import flashoverlap.torch as fo

from ..overlap import Overlap
from ..patterns import split_sizes
from .case import Case
from .contestant import Contestant, Ours
from .dense_attention import attended
from .shapes import AttentionShape
from .slices import SlicedSequences


class Attention(Case):
    """``attention(q, k, v) @ weight.T`` of all heads.

    q [B, H, S, D], k and v [B, G, S, D], weight [N, H * D]; a rank holds the heads that torch.tensor_split gives it of
    G, with the queries that read them, and their columns of the weight.

    Attributes:
        full: the whole tensors by name.
        leaves: those of own heads by name; in a training pass they receive gradients.
    """

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, rank: int, world_size: int) -> None:
        self.shape, self.dtype, self.rank, self.world_size = shape, dtype, rank, world_size
        self.full, self._full_grad = _values(shape, dtype)
        owned = split_sizes(shape.kv_heads, world_size)
        first = sum(owned[:rank])
        own, each = range(first, first + owned[rank]), shape.heads // shape.kv_heads
        heads = slice(own.start * each, own.stop * each)
        columns = slice(heads.start * shape.head_dim, heads.stop * shape.head_dim)
        parts = {
            "q": self.full["q"][:, heads],
            "k": self.full["k"][:, own.start : own.stop],
            "v": self.full["v"][:, own.start : own.stop],
            "weight": self.full["weight"][:, columns],
        }
        self.leaves = {name: part.clone().requires_grad_() for name, part in parts.items()}
        rows = split_sizes(shape.seq, world_size)
        self._rows = range(sum(rows[:rank]), sum(rows[: rank + 1]))
        self.grad = self._full_grad[:, self._rows.start : self._rows.stop].clone()

    def contestant(self, group: Any, transport: Any, overlap: Overlap, variant: str = "") -> Contestant:
        """All modes on the same leaves, since an operator holds none; slices are of sequences, by torch's collectives.

        Of one sequence they are of query rows, by an operator: each slice of its heads would scatter all rows.
        """
        if overlap.mode == "slice" and self.shape.batch > 1:
            return SlicedSequences(self, group, overlap.slices or 1)
        forward = self.row if variant == "row" else self.forward
        detail = f"{overlap.slices} slices of rows" if overlap.mode == "slice" else ""
        return Ours(lambda: forward(transport, overlap), self.leaves, detail)

    def forward(self, group: Any, overlap: Overlap) -> torch.Tensor:
        """Own rows of the output by one ``fo.attention_reduce_scatter``."""
        q, k, v, weight = (self.leaves[name] for name in ("q", "k", "v", "weight"))
        return fo.attention_reduce_scatter(q, k, v, weight, causal=self.shape.causal, group=group, overlap=overlap)

    def row(self, group: Any, overlap: Overlap) -> torch.Tensor:
        """The same with all of attention first: the scatter hides behind the row-parallel linear alone."""
        q, k, v, weight = (self.leaves[name] for name in ("q", "k", "v", "weight"))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.shape.causal, enable_gqa=grouped)
        return fo.linear_reduce_scatter(out.transpose(1, 2).flatten(2), weight, group=group, overlap=overlap)

    def reference(self, train: bool) -> dict[str, torch.Tensor]:
        """Own rows of the output, of all heads; and gradients of own heads, from all rows."""
        q, k, v, weight = (self.full[name].double() for name in ("q", "k", "v", "weight"))
        found = {"out": attended(q, k, v, self._rows, self.shape.causal) @ weight.t()}
        if train:
            q, k, v, weight = (self.leaves[name].detach().double() for name in ("q", "k", "v", "weight"))
            for leaf in (q, k, v):
                leaf.requires_grad_()
            grad = self._full_grad.double()
            out = attended(q, k, v, range(self.shape.seq), self.shape.causal, grad @ weight)
            for name, leaf in (("q", q), ("k", k), ("v", v)):
                assert leaf.grad is not None
                found[name] = leaf.grad
            found["weight"] = grad.flatten(0, 1).t() @ out.flatten(0, 1)
        return found


def _values(shape: AttentionShape, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The full tensors, and the gradient of the output; queries and keys are large enough for softmax to choose."""
    generator = torch.Generator().manual_seed(shape.seq + shape.hidden + shape.heads)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    heads, kv_heads = ((shape.batch, count, shape.seq, shape.head_dim) for count in (shape.heads, shape.kv_heads))
    full = {"q": 2 * normal(*heads), "k": normal(*kv_heads), "v": normal(*kv_heads)}
    full["weight"] = normal(shape.hidden, shape.hidden) / shape.hidden**0.5
    grad = normal(shape.batch, shape.seq, shape.hidden)
    return {name: tensor.to(dtype) for name, tensor in full.items()}, grad.to(dtype)
