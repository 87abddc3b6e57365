"""Waiting for what torch's distributed tensors hand out while it is still under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from ..contestant import Contestant


class Arriving(Contestant):
    """A module made of DTensors; without waiting its times would be too good.

    Args:
        run: the own part of the output, which may be under way.
        leaves: parameters, and the inputs that want a gradient.
    """

    def __init__(self, run: Callable[[], torch.Tensor], leaves: Mapping[str, torch.Tensor]) -> None:
        self._run, self.leaves = run, leaves

    def forward(self) -> torch.Tensor:
        """The own part of the output, arrived."""
        return arrived(self._run())

    def backward(self, out: torch.Tensor, grad: torch.Tensor) -> None:
        """Runs the backward pass and waits for all gradients; sums still due are made, as a step needs them."""
        out.backward(grad)
        for leaf in self.leaves.values():
            gradient: Any = leaf.grad
            if isinstance(gradient, DTensor) and isinstance(leaf, DTensor):
                if any(placement.is_partial() for placement in gradient.placements):
                    gradient = leaf.grad = gradient.redistribute(placements=leaf.placements)
                gradient = gradient.to_local()
            if gradient is not None:
                arrived(gradient)


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, which may have been under way, arrived."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor.wait()
    return tensor
