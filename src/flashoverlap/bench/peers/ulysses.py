"""What packages with an Ulysses of their own are given: the projections in front of it and behind it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F

from ..contestant import Contestant


class UlyssesBlock(Contestant):
    """The block of a case, with a package's way from own rows to own heads and back.

    Weight gradients are those of own rows, as the case has them.
    """

    def __init__(self, case: Any) -> None:
        self._case = case
        self.leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in case.leaves.items()}

    def forward(self) -> torch.Tensor:
        """Own rows of the output."""
        x, *projections, wo = (self.leaves[name] for name in ("x", "wq", "wk", "wv", "wo"))
        heads = (F.linear(x, weight).unflatten(-1, (-1, self._case.shape.head_dim)) for weight in projections)
        return F.linear(self.attend(*heads).flatten(2), wo)

    @abstractmethod
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention ``[B, S_r, heads, D]`` of own rows."""

    def local(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of own heads, all ``[B, S, heads, D]``."""
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=self._case.shape.causal, enable_gqa=grouped).transpose(
            1, 2
        )
