"""One more forward and backward pass of a mode, untimed and without an optimizer step: peak memory, trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..torch.staging import Staging
from ..torch.transport import transport_of
from ..trace import Span, Trace
from .live_bytes import LiveBytes, held
from .ranks import Ranks
from .step import Training


def peak_bytes(training: Training, ranks: Ranks, step: int) -> int:
    """The most bytes of tensors live at once, on the rank that needs most (live_bytes.py says which are counted)."""
    transport: Any = transport_of(ranks.mesh, like=next(training.model.parameters()))
    kept, transport.staging = transport.staging, Staging()  # all modes share it, each is to count what it needs itself
    try:
        with LiveBytes(held(training.model, training.optimizer)) as live:
            training.forward_backward(step)
    finally:
        transport.staging = kept
    training.optimizer.zero_grad()
    peak = torch.tensor([live.peak])
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=ranks.control)
    return int(peak)


def save_trace(training: Training, ranks: Ranks, step: int, path: Path) -> None:
    """Writes a trace of all ranks for Perfetto; on one machine all clocks are one."""
    transport: Any = transport_of(ranks.mesh, like=next(training.model.parameters()))
    dist.barrier(group=ranks.control)
    spans: list[Span] = []
    transport.spans = spans
    try:
        training.forward_backward(step)
    finally:
        transport.spans = None
    training.optimizer.zero_grad()
    gathered: list[Any] = [None] * ranks.count
    dist.all_gather_object(gathered, spans, group=ranks.control)
    if ranks.rank == 0:
        Trace.merge(Trace.of(each) for each in gathered).save(path)
