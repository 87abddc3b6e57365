"""What can be timed: the library in one of its modes, or somebody else's module on the same weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..torch.staging import Staging
from ..torch.transport import Silent, transport_of
from .matmul_clock import Tails


class Contestant(ABC):
    """One rank's module and its leaves, ready to run forward and backward.

    Attributes:
        leaves: by the names that the case has for them; tensors of their own, unless the contestant only calls
            operators on those of the case.
        detail: what it is; "" where the library's report says it.
    """

    leaves: Mapping[str, torch.Tensor]
    detail: str = ""

    def prepare(self) -> None:  # noqa: B027
        """Does what is to come right before what is timed: nothing, unless a contestant says otherwise."""

    def run(self, grad: torch.Tensor | None) -> torch.Tensor:
        """What is timed: one pass, forward alone where there is no gradient of the own part of the output.

        Returns:
            The own part of the output, arrived; all gradients have arrived as well.
        """
        if grad is None:
            with torch.no_grad():
                return self.forward()
        out = self.forward()
        self.backward(out, grad)
        return out

    @abstractmethod
    def forward(self) -> torch.Tensor:
        """The own part of the output, arrived."""

    def backward(self, out: torch.Tensor, grad: torch.Tensor) -> None:
        """Runs the backward pass until all gradients have arrived; ``grad`` is that of the own part of the output."""
        out.backward(grad)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients, each as the own part of what the case has, or as a DTensor of the whole."""
        return {name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}

    def results(self, out: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is compared with the case's reference after a run that gave ``out``."""
        return {"out": out, **self.gradients()}

    def clear(self) -> None:
        """Forgets what runs have left behind."""
        for leaf in self.leaves.values():
            leaf.grad = None

    def held(self) -> Iterable[torch.Tensor]:
        """What lies in memory before a pass."""
        return self.leaves.values()

    def transports(self, group: Any) -> list[Any]:
        """Those that it moves something over, of the library's, where it is one of its modes."""
        return [transport_of(group)]

    def blocked_s(self) -> float | None:
        """What the last run stood waiting, where the library's report has no record of it; None where nobody counts."""
        return None

    def tails(self) -> Tails | None:
        """What of a training step hides behind no matmul; None of a case that does not train."""
        return None


class Ours(Contestant):
    """The library in one mode: what runs it on this rank, the leaves that it uses, and what the report does not say."""

    def __init__(self, run: Callable[[], torch.Tensor], leaves: Mapping[str, torch.Tensor], detail: str = "") -> None:
        self._run, self.leaves, self.detail = run, leaves, detail

    def forward(self) -> torch.Tensor:
        """The own part of the output."""
        return self._run()


class _FilledStaging(Staging):
    """Staging whose fresh buffers hold ordinary numbers, since nothing arrives that would overwrite them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def fresh(self, bytes: int, device: torch.device) -> torch.Tensor:
        """A new buffer, filled."""
        buffer = super().fresh(bytes, device)
        whole = buffer.numel() // self._dtype.itemsize * self._dtype.itemsize
        buffer[:whole].view(self._dtype).uniform_()  # none negative, since a loss takes logarithms of sums
        return buffer


def silent(rank: int, world_size: int, dtype: torch.dtype) -> Silent:
    """The group on which a case of this dtype costs its computation alone."""
    group = Silent(rank, world_size)
    group.staging = _FilledStaging(dtype)
    return group
