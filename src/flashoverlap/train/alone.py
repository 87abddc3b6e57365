"""What a step costs without communication: the same step, on a transport that moves nothing."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from ..overlap import Overlap
from ..torch.parallelize import apply
from ..torch.staging import Staging
from ..torch.transport import Silent
from .model import build
from .options import Options
from .ranks import Ranks
from .step import ADAMW, Training
from .text import Text

_STEPS = 3  # that are timed, after one that is not


def compute_alone(options: Options, ranks: Ranks, text: Text, configuration: Any) -> Training:
    """A run whose operators move nothing. Its losses mean nothing."""
    silent = Silent(ranks.rank, ranks.count, options.seq)
    silent.staging = _ZeroStaging()
    how: dict[str, Any] = {"attention": options.queries, "overlap": Overlap("off")}
    model = apply(build(configuration, options, ranks.device), ranks.mesh, silent, **how)
    return Training(model, torch.optim.AdamW(model.parameters(), **ADAMW), text, options)


def computation_alone(options: Options, ranks: Ranks, text: Text, configuration: Any) -> float | None:
    """Seconds of a step without communication, on the slowest rank; None where there is but one.

    The model that this takes is let go afterwards.
    """
    if ranks.count == 1:
        return None
    training = compute_alone(options, ranks, text, configuration)
    return median([ranks.stopwatch.time(lambda: training.step(0)).seconds for _ in range(1 + _STEPS)][1:])


class _ZeroStaging(Staging):
    """Staging whose fresh buffers hold zeros, since nothing arrives that would overwrite whatever lay there."""

    def fresh(self, bytes: int, device: torch.device) -> torch.Tensor:
        """A new buffer of zeros."""
        return super().fresh(bytes, device).zero_()
