"""What can be timed: the library in one of its modes, or somebody else's module on the same weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from ..overlap import Overlap
from ..torch.staging import Staging
from ..torch.transport import Silent
from .candidates import Candidate
from .case import Case
from .options import Options


class Contestant(ABC):
    """One rank's module and its leaves, ready to run forward and backward.

    Attributes:
        leaves: by the names that the case has for them.
    """

    leaves: Mapping[str, torch.Tensor]

    @abstractmethod
    def forward(self) -> torch.Tensor:
        """The own part of the output, arrived."""

    def backward(self, out: torch.Tensor, grad: torch.Tensor) -> None:
        """Runs the backward pass until all gradients have arrived."""
        out.backward(grad)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Own parts of the gradients, as plain tensors."""
        return {name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}

    def clear(self) -> None:
        """Forgets all gradients."""
        for leaf in self.leaves.values():
            leaf.grad = None


class Ours(Contestant):
    """The library's operators on a group, in one mode."""

    def __init__(self, case: Case, group: Any, overlap: Overlap) -> None:
        self._case, self._group, self._overlap = case, group, overlap
        self.leaves = case.leaves

    def forward(self) -> torch.Tensor:
        """The own part of the output."""
        return self._case.forward(self._group, self._overlap)


class _FilledStaging(Staging):
    """Staging whose fresh buffers hold ordinary numbers, since nothing arrives that would overwrite them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._filled: set[int] = set()

    def take(self, bytes: int, device: torch.device) -> torch.Tensor:
        """A buffer, filled where it is new."""
        buffer = super().take(bytes, device)
        if buffer.data_ptr() not in self._filled:
            self._filled.add(buffer.data_ptr())
            whole = buffer.numel() // self._dtype.itemsize * self._dtype.itemsize
            buffer[:whole].view(self._dtype).normal_()
        return buffer


def silent(case: Case) -> Silent:
    """The group on which a case costs its computation alone."""
    group = Silent(case.rank, case.world_size)
    group.staging = _FilledStaging(case.grad.dtype)
    return group


def contestant(candidate: Candidate, case: Case, group: Any, options: Options) -> Contestant:
    """What a candidate stands for, on this rank."""
    if candidate.overlap is None:
        peer = import_module(f"flashoverlap.bench.peers.{candidate.row}")  # late: a peer may not be installed
        return peer.CONTESTANTS[options.shape.case](case, group)
    return Ours(case, silent(case) if candidate.silent else group, candidate.overlap)
