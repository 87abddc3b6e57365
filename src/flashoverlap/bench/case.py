"""What a workload is: one rank's shards, the operators that run it, and the float64 reference of the whole.

To add one: a Shape (shape.py), a Case in a file of its own, a line in :func:`case_of`, a command in cli/bench.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from ..overlap import Overlap
from .shape import Shape


class Case(ABC):
    """One rank's part of a workload.

    Attributes:
        leaves: own shards by name; in a training pass they receive gradients.
        grad: gradient of the own part of the output.
    """

    leaves: Mapping[str, torch.Tensor]
    grad: torch.Tensor
    rank: int
    world_size: int

    @abstractmethod
    def forward(self, group: Any, overlap: Overlap) -> torch.Tensor:
        """The own part of the output, by the library's operators on ``group`` (a process group or a transport)."""

    @abstractmethod
    def reference(self, train: bool) -> dict[str, torch.Tensor]:
        """The own part of the output ("out"), and of each leaf's gradient, by the unsharded module in float64."""


def case_of(shape: Shape, dtype: torch.dtype, rank: int, world_size: int) -> Case:
    """The case of this shape, with values that are the same on every rank for the same shape and dtype."""
    from .mlp import Mlp  # late, since it imports this file

    return {"mlp": Mlp}[shape.case](shape, dtype, rank, world_size)  # pyright: ignore[reportArgumentType]
