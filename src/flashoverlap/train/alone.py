"""What a step costs without communication: the same step, on a transport that moves nothing."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from ..overlap import Overlap
from ..torch.data_parallel.apply import apply as data_parallel
from ..torch.data_parallel.apply import with_sequence
from ..torch.parallelize import apply as parallelize
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
    silent = ranks.silent(options.seq)
    for transport in silent.values():
        transport.staging = _ZeroStaging()
    group = [silent[name] for name in ranks.mesh.mesh_dim_names or ()]
    how: dict[str, Any] = {"attention": options.attending, "overlap": Overlap("off")}
    model = parallelize(build(configuration, options, ranks.device), ranks.mesh, group, **how)
    if options.dp > 1:
        mesh = with_sequence(model, ranks.replicas)
        group = Silent(mesh.get_local_rank(), mesh.size())
        group.staging = _ZeroStaging()
        data_parallel(model, mesh, group, shard=options.sharding, overlap=Overlap("off"))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Training(model, optimizer, text, options, silent["dp"])


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
