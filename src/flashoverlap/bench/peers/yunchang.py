"""yunchang's Ulysses: its differentiable all-to-all around torch's scaled_dot_product_attention.

Its attention classes have no way to run on a CPU; its all-to-all does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..contestant import Contestant
from .ulysses import UlyssesBlock

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of kernels that are not installed, and not wanted
    from yunchang.comm.all_to_all import SeqAllToAll4D  # pyright: ignore[reportMissingImports]


class YunchangUlysses(UlyssesBlock):
    """Four all-to-alls, one after another."""

    def __init__(self, case: Any, group: Any) -> None:
        super().__init__(case)
        self._group = group

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Own rows of all heads, by way of own heads of all rows."""
        own_heads = (SeqAllToAll4D.apply(self._group, each, 2, 1) for each in (q, k, v))
        return SeqAllToAll4D.apply(self._group, self.local(*own_heads), 1, 2)


CONTESTANTS: dict[str, Callable[[Any, Any], Contestant]] = {"ulysses": YunchangUlysses}
