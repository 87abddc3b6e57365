"""DeepSpeed's Ulysses: DistributedAttention between projections, with torch's scaled_dot_product_attention inside."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ..contestant import Contestant
from .ulysses import UlyssesBlock

logging.disable(logging.WARNING)  # while it is loaded: that it has found no accelerator is no news
try:
    import deepspeed.comm  # pyright: ignore[reportMissingImports]
    from deepspeed.sequence.layer import DistributedAttention  # pyright: ignore[reportMissingImports]
finally:
    logging.disable(logging.NOTSET)


class DeepSpeedUlysses(UlyssesBlock):
    """Without a stream of its own for communication, which a CPU does not have."""

    def __init__(self, case: Any, group: Any) -> None:
        super().__init__(case)
        if not deepspeed.comm.is_initialized():
            deepspeed.comm.init_distributed("gloo", verbose=False)
        self._attention = DistributedAttention(self.local, group, scatter_idx=2, gather_idx=1, sp_stream=None)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Own rows of all heads, by way of own heads of all rows."""
        return self._attention(q, k, v, 0)


CONTESTANTS: dict[str, Callable[[Any, Any], Contestant]] = {"ulysses": DeepSpeedUlysses}
