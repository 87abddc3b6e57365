"""One more forward and backward pass of a mode, untimed and without an optimizer step: peak memory, trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..live_bytes import LiveBytes, held
from ..torch.staging import Staging
from ..trace import Span, Trace
from .ranks import Ranks
from .step import Training


def peak_bytes(training: Training, ranks: Ranks, step: int) -> int:
    """The most bytes of tensors live at once, on the rank that needs most (live_bytes.py says which are counted)."""
    transports = _transports(training, ranks)
    kept = [transport.staging for transport in transports]
    try:
        for transport in transports:  # all modes share it, each is to count what it needs itself
            transport.staging = Staging()
        with LiveBytes(held(training.model, training.optimizer)) as live:
            training.forward_backward(step)
    finally:
        for transport, staging in zip(transports, kept, strict=True):
            transport.staging = staging
    training.optimizer.zero_grad()
    peak = torch.tensor([live.peak])
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=ranks.control)
    return int(peak)


def save_trace(training: Training, ranks: Ranks, step: int, path: Path) -> None:
    """Writes a trace of all ranks for Perfetto; on one machine all clocks are one."""
    dist.barrier(group=ranks.control)
    spans: list[Span] = []
    try:
        for transport in _transports(training, ranks):
            transport.spans = spans
        training.forward_backward(step)
    finally:
        for transport in _transports(training, ranks):
            transport.spans = None
    training.optimizer.zero_grad()
    gathered: list[Any] = [None] * ranks.count
    dist.all_gather_object(gathered, spans, group=ranks.control)
    if ranks.rank == 0:
        Trace.merge(Trace.of(each) for each in gathered).save(path)


def _transports(training: Training, ranks: Ranks) -> list[Any]:
    """All on which a model moves something: those of its operators, and those of its gradients."""
    engine: Any = getattr(training.model, "_engine", None)
    return ranks.transports + ([] if engine is None else [engine.channels.reduce, engine.channels.gather])
