"""Peak memory of one pass of one model, in a process that holds several.

What the operating system says of a process counts all models in it, and pages that an allocator keeps. So every tensor
that an operator takes or returns while :class:`LiveBytes` is active is counted as long as its storage lives, at the
size that it has, on top of what is there before: parameters, optimizer state, staging. Memory that is taken inside an
operator of torch is not seen, nor what gloo itself holds; both are the same in all modes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
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
        self._more = self.peak = more
        self._count(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._count(each for each in tree_iter((args, kwargs, out)) if isinstance(each, torch.Tensor))
        return out

    def _count(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            for plain in _plain(tensor):
                storage = plain.untyped_storage()
                key = storage._cdata
                if key not in self._known:
                    self._known[key] = weakref.ref(storage, lambda _, key=key: self._known.pop(key, None))
        # anew each time: a storage that lives may have given its bytes up, as those of gathered parameters do
        storages = [known() for known in list(self._known.values())]
        self.peak = max(self.peak, self._more + sum(each.nbytes() for each in storages if each is not None))


def _plain(tensor: Any) -> Iterator[torch.Tensor]:
    """The tensors that a distributed tensor is made of, or a tensor itself."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # else a mesh
                yield from _plain(part)
    else:
        yield tensor


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters, buffers, gradients and optimizer state."""
    states = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    return [*model.parameters(), *model.buffers(), *grads, *states]
