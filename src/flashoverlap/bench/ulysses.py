"""Ulysses attention: own rows in, own rows out, own heads between two all-to-alls."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

import flashoverlap.torch as fo

from ..overlap import Overlap
from ..patterns import split_sizes
from ..torch.functional.shares import features_of, tensor_split
from .case import Case
from .contestant import Contestant, Ours
from .dense_attention import attended
from .shapes import UlyssesShape
from .slices import SlicedUlysses

WEIGHTS = ("wq", "wk", "wv", "wo")


class Ulysses(Case):
    """``attention(x wq.T, x wk.T, x wv.T) wo.T``.

    x [B, S, K], wq [H * D, K], wk and wv [G * D, K], wo [K, H * D]; a rank holds x [B, S_r, K] and all weights. A
    weight's gradient is that of the own rows: its sum over the ranks is the business of data parallelism, and nobody
    who is timed here makes it.

    Attributes:
        full: the whole tensors by name.
        leaves: own rows of x, and the weights.
        kv_heads: key and value heads by rank, with which the heads go that read them.
    """

    def __init__(self, shape: UlyssesShape, dtype: torch.dtype, rank: int, world_size: int) -> None:
        self.shape, self.dtype, self.rank, self.world_size = shape, dtype, rank, world_size
        self.full, self._full_grad = _values(shape, dtype)
        rows = split_sizes(shape.seq, world_size)
        self.kv_heads = tensor_split(shape.kv_heads, world_size)
        self._rows = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
        parts = {**self.full, "x": self.full["x"][:, self._rows]}
        self.leaves = {name: part.clone().requires_grad_() for name, part in parts.items()}
        self.grad = self._full_grad[:, self._rows].clone()

    def contestant(self, group: Any, transport: Any, overlap: Overlap, variant: str = "") -> Contestant:
        """All modes on the same leaves, since an operator holds none; slices are of heads, by torch's collectives."""
        if overlap.mode == "slice":
            return SlicedUlysses(self, group, overlap.slices or 1)
        return Ours(lambda: self.forward(transport, overlap), self.leaves)

    def forward(self, group: Any, overlap: Overlap) -> torch.Tensor:
        """Own rows of the output by ``fo.linear_all_to_all`` and ``fo.attention_all_to_all_linear``."""
        x, *projections, wo = (self.leaves[name] for name in ("x", *WEIGHTS))
        queries, keys = self._shares(self.shape.heads // self.shape.kv_heads), self._shares(1)
        projected = fo.linear_all_to_all(x, projections, shares=[queries, keys, keys], group=group, overlap=overlap)
        q, k, v = map(self.by_head, projected)
        return fo.attention_all_to_all_linear(
            q, k, v, wo, causal=self.shape.causal, shares=queries, group=group, overlap=overlap
        )

    def _shares(self, readers: int) -> list[range]:
        """By rank, the features of so many heads for each of its key and value heads."""
        return [features_of(own, readers * self.shape.head_dim) for own in self.kv_heads]

    def by_head(self, rows: torch.Tensor) -> torch.Tensor:
        """``[B, rows, heads * D]`` as ``[B, heads, rows, D]``."""
        return rows.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

    def reference(self, train: bool) -> dict[str, torch.Tensor]:
        """Own rows of the output and of the gradient of x; of the weights' gradients, what own rows add."""
        own, causal = self._rows, self.shape.causal
        x, *projections, wo = (self.full[name].double() for name in ("x", *WEIGHTS))
        q, k, v = (self.by_head(linear(x, weight)).detach().requires_grad_(train) for weight in projections)
        if not train:
            return {"out": linear(attended(q, k, v, range(own.start, own.stop), causal), wo)}
        grad = self._full_grad.double()
        out = attended(q, k, v, range(self.shape.seq), causal, grad @ wo)
        found = {"out": linear(out[:, own], wo), "x": torch.zeros_like(x[:, own])}
        for name, leaf, weight in zip(WEIGHTS, (q, k, v), projections, strict=False):
            assert leaf.grad is not None
            rows = leaf.grad.transpose(1, 2).flatten(2)[:, own]
            found["x"] += rows @ weight
            found[name] = rows.flatten(0, 1).t() @ x[:, own].flatten(0, 1)
        found["wo"] = grad[:, own].flatten(0, 1).t() @ out[:, own].flatten(0, 1)
        return found


def _values(shape: UlyssesShape, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The full tensors, scaled so that outputs are of order one, and the gradient of the output."""
    generator = torch.Generator().manual_seed(shape.seq + shape.hidden + shape.heads)
    hidden, kv_features = shape.hidden, shape.kv_heads * shape.head_dim

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    full = {"x": normal(shape.batch, shape.seq, hidden)}
    for name, features in zip(WEIGHTS, (hidden, kv_features, kv_features, hidden), strict=True):
        full[name] = normal(features, hidden) / hidden**0.5
    grad = normal(shape.batch, shape.seq, hidden)
    return {name: tensor.to(dtype) for name, tensor in full.items()}, grad.to(dtype)
