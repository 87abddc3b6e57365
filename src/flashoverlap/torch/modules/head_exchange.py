"""Ulysses inside of an attention: sharded by rows outside, sharded by heads inside, by all-to-alls over up.

B sequences of S tokens, ranks (u, t) of a mesh (up, tp); features N_t of the heads of t, N_ut of u's share of them
into heads     own rows [B, S_ut, K]  ->  q, k, v: all rows [B, S, N_ut]
out of heads   all rows [B, S, N_ut]  ->  own rows [B, S_ut, K_out] of the output projection

Without tp the all-to-alls hide behind the projections and the attention. With it the projections hide the gather and
the scatter of tp; the attention hides the all-to-all out of it, and the one into it goes by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..functional import (
    all_gather_linear,
    all_to_all_linear,
    linear_all_to_all,
    linear_reduce_scatter,
)
from ..functional.head_exchange import heads_to_rows, rows_to_heads
from ..functional.shares import Shares
from ..functional.ulysses_attention import attention_all_to_all, attention_by_heads
from .lazy import Lazy
from .lazy_attention import LazyAttention, computing
from .lazy_rows import own_rows
from .linear import Column, Row
from .parallel import Parallel, become


def into_heads(hidden: torch.Tensor, linears: Sequence[Column], shares: Sequence[Shares]) -> list[torch.Tensor]:
    """What column-parallel linears make of own rows: all rows of own heads, for each linear.

    Args:
        hidden: own rows ``[B, S_ut, K]``.
        linears: q, k and v, or one that holds the three side by side.
        shares: for q, k and v, the features of each rank of up among those of the own tp.
    """
    parallel = linears[0]._parallel
    assert parallel.up is not None
    over_up, own = parallel.along(parallel.up), own_rows(hidden)
    weights: list[Any] = [weight for linear in linears for weight in linear.parts("weight")]
    biases = [bias for linear in linears for bias in linear.parts("bias")]
    if parallel.world_size == 1:
        heads = list(linear_all_to_all(own, weights, biases, shares=shares, **over_up))
    else:
        rows = all_gather_linear(own, weights, biases, **parallel.call)
        heads = [rows_to_heads(each, share, **over_up) for each, share in zip(rows, shares, strict=True)]
    return heads if len(linears) == len(heads) else [torch.cat(heads, -1)]


class HeadsRow(Row):
    """The output projection of an attention under Ulysses."""

    _shares: Shares

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Own rows, of all rows of own heads."""
        parallel, weights = self._parallel, (self.shard(), self.replicated_bias())
        assert parallel.up is not None
        exchange = {"shares": self._shares, **parallel.along(parallel.up)}
        alone = parallel.world_size == 1
        if isinstance(x, LazyAttention) and x.form == "flat":
            with computing():
                if alone:
                    return attention_by_heads(x.heads, *weights, **exchange)
                rows = attention_all_to_all(x.heads, **exchange)
        else:
            x = x.all() if isinstance(x, Lazy) else x
            if alone:
                return all_to_all_linear(x, *weights, **exchange)
            rows = heads_to_rows(x, **exchange)
        return linear_reduce_scatter(rows, *weights, **parallel.call)


def become_heads_row(module: nn.Module, parallel: Parallel, shares: Shares, *, transposed: bool) -> None:
    """Makes a linear a :class:`HeadsRow`."""
    become(module, HeadsRow, parallel, _transposed=transposed, _shares=shares)
