"""What a workload is: one rank's part of it, the library's way to run that, and the float64 reference of the whole.

To add one: a Shape in shapes/, a Case in a file of its own, and a line in SHAPES and in :func:`case_of`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch

from ..overlap import Overlap
from .contestant import Contestant
from .shapes import Shape

_CASES = {
    "mlp": ("mlp", "Mlp"),
    "attention": ("attention", "Attention"),
    "ulysses": ("ulysses", "Ulysses"),
    "block": ("block", "Block"),
    "model": ("model", "Model"),
    "dp": ("stack", "Stack"),
    "dp_llm": ("llm", "Llm"),
}


class Case(ABC):
    """One rank's part of a workload.

    Attributes:
        shape: its sizes.
        dtype: of all tensors.
        grad: gradient of the own part of the output.
        passes: how many passes follow each other in what is timed at once.
        units: by name, the least for which the tolerance of an error holds, where it is not one.
    """

    shape: Any
    dtype: torch.dtype
    grad: torch.Tensor
    rank: int
    world_size: int
    passes: int = 1
    units: Mapping[str, float] = MappingProxyType({})

    @abstractmethod
    def contestant(self, group: Any, transport: Any, overlap: Overlap, variant: str = "") -> Contestant:
        """The library in one mode.

        Args:
            group: the process group whose ranks hold the shards.
            transport: what the operators are called on: the same group, or a transport that moves nothing.
            overlap: the mode.
            variant: of the shape's variants, or "".
        """

    @abstractmethod
    def reference(self, train: bool) -> dict[str, torch.Tensor]:
        """What the unsharded module gives in float64: the own part of the output ("out"), and each leaf's gradient.

        A gradient is the own part where leaves are plain tensors, and whole where contestants hold DTensors.
        """


def case_of(shape: Shape, dtype: torch.dtype, rank: int, world_size: int) -> Case:
    """The case of this shape, with values that are the same on every rank for the same shape and dtype."""
    # late, since they import this file, and not every case's packages need be there
    module, name = _CASES[shape.case]
    return getattr(import_module(f"flashoverlap.bench.{module}"), name)(shape, dtype, rank, world_size)
