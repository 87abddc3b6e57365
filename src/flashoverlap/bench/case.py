"""What a workload is: one rank's part of it, the library's way to run that, and the float64 reference of the whole.

To add one: a Shape (shape.py), a Case in a file of its own, a line in :func:`case_of`, a command in cli/bench.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from ..overlap import Overlap
from .contestant import Contestant
from .shape import Shape


class Case(ABC):
    """One rank's part of a workload.

    Attributes:
        shape: its sizes.
        dtype: of all tensors.
        grad: gradient of the own part of the output.
    """

    shape: Any
    dtype: torch.dtype
    grad: torch.Tensor
    rank: int
    world_size: int

    @abstractmethod
    def contestant(self, group: Any, transport: Any, overlap: Overlap) -> Contestant:
        """The library in one mode.

        Args:
            group: the process group whose ranks hold the shards.
            transport: what the operators are called on: the same group, or a transport that moves nothing.
            overlap: the mode.
        """

    @abstractmethod
    def reference(self, train: bool) -> dict[str, torch.Tensor]:
        """What the unsharded module gives in float64: the own part of the output ("out"), and each leaf's gradient.

        A gradient is the own part where leaves are plain tensors, and whole where contestants hold DTensors.
        """


def case_of(shape: Shape, dtype: torch.dtype, rank: int, world_size: int) -> Case:
    """The case of this shape, with values that are the same on every rank for the same shape and dtype."""
    # late, since they import this file, and not every case's packages need be there
    if shape.case == "mlp":
        from .mlp import Mlp as Made
    elif shape.case == "block":
        from .block import Block as Made
    else:
        from .model import Model as Made
    return Made(shape, dtype, rank, world_size)  # pyright: ignore[reportArgumentType]
