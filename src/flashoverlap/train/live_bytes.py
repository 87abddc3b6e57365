"""Peak memory of one forward and backward pass of one model, in a process that holds several.

What the operating system says of a process counts all models in it, and pages that an allocator keeps. So every tensor
that an operator returns while :class:`LiveBytes` is active is counted as long as its storage lives, on top of what is
there before: parameters, optimizer state, staging. Memory that is taken inside an operator of torch is not seen, nor
what gloo itself holds; both are the same in all modes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors.

    Attributes:
        peak: the most that were live at once.
    """

    def __init__(self, before: Iterable[torch.Tensor], more: int = 0) -> None:
        """Starts from tensors that are there, and from bytes that are held elsewhere."""
        super().__init__()
        self._known: dict[int, weakref.ref[Any]] = {}
        self._now = self.peak = more
        for tensor in before:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_iter(out):
            if isinstance(each, torch.Tensor):
                self._add(each)
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        count = storage.nbytes()

        def gone(_: object) -> None:
            self._known.pop(key, None)
            self._now -= count

        self._known[key] = weakref.ref(storage, gone)
        self._now += count
        self.peak = max(self.peak, self._now)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters, buffers, gradients and optimizer state."""
    states = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    return [*model.parameters(), *model.buffers(), *grads, *states]
