"""MFU: the arithmetic that a model asks for, against what matrix multiplications reach on these ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .model import without_memory
from .options import Options
from .ranks import Ranks
from .result import Scale
from .stopwatch import Stopwatch

_SIZES = {"cpu": 1024}  # and 8192 on accelerators
_SECONDS = 0.5


def scale_of(options: Options, ranks: Ranks, configuration: Any) -> Scale:
    """What turns seconds into rates; measures the matmul peak, which takes a moment."""
    flops = flops_per_token(without_memory(configuration), configuration, options.seq)
    tokens = options.tokens_per_step
    return Scale(options.model, ranks.degrees, tokens, flops * tokens, matmul_peak(_dtype(options), ranks.stopwatch))


def measured_again(scale: Scale, options: Options, ranks: Ranks) -> Scale:
    """The same with the higher of two measured peaks: whatever else ran meanwhile only takes from a peak."""
    peak = matmul_peak(_dtype(options), ranks.stopwatch)
    return replace(scale, peak_flops_per_s=max(peak, scale.peak_flops_per_s))


def _dtype(options: Options) -> torch.dtype:
    return torch.bfloat16 if options.dtype == "bf16" else torch.float32


def flops_per_token(model: nn.Module, configuration: Any, seq: int) -> float:
    """Floating-point operations of forward and backward for one token of a sequence.

    Six for each weight of a linear (two forward, four backward; an embedding that is looked up costs none). For
    attention 12 for each feature of the queries and each key that a query may look at: under a causal mask half of the
    keys, in a sliding window fewer. What activation checkpointing computes again does not count.

    Args:
        model: the whole, unsharded one.
        configuration: of the model.
        seq: tokens of a sequence.
    """
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
    weights = sum(linear.weight.numel() for linear in linears)  # pyright: ignore[reportCallIssue]
    heads = configuration.num_attention_heads
    features = heads * (getattr(configuration, "head_dim", None) or configuration.hidden_size // heads)
    return 6 * weights + 12 * features * sum(_mean_keys(seq, window) for window in _windows(configuration))


def _windows(configuration: Any) -> list[int | None]:
    """How many keys a query of each layer may look at; None for all before it."""
    window = getattr(configuration, "sliding_window", None)
    kinds = getattr(configuration, "layer_types", None)
    if kinds is None:
        return [window] * configuration.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _mean_keys(seq: int, window: int | None) -> float:
    """Keys that a query looks at under a causal mask, averaged over a sequence."""
    window = min(seq, window or seq)
    return (window * (window + 1) / 2 + (seq - window) * window) / seq


def matmul_peak(dtype: torch.dtype, stopwatch: Stopwatch) -> float:
    """Floating-point operations per second of all ranks together, each with the threads that it trains with.

    The best of several products of square matrices, on all ranks at once since they may share cores.
    """
    size = _SIZES.get(stopwatch.device.type, 8192)
    a, b = (torch.randn(size, size, device=stopwatch.device).to(dtype) for _ in range(2))
    out = a @ b
    stopwatch.synchronize()
    dist.barrier(group=stopwatch.group)
    best_s, end_s = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < end_s:
        begin_s = time.perf_counter()
        torch.mm(a, b, out=out)
        stopwatch.synchronize()
        best_s = min(best_s, time.perf_counter() - begin_s)
    peak = torch.tensor([2 * size**3 / best_s], dtype=torch.float64)
    dist.all_reduce(peak, group=stopwatch.group)
    return float(peak)
