"""What the modules of a data-parallel model become: each stays of its class, with a little in front.

The model itself starts what belongs to a step. A module with parameters of its own shows whole values while it
computes, and what the optimizer steps on otherwise. A plain nn.Linear computes block by block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..connected import Connected
from .engine import Engine
from .linear import Fused
from .unit import Member


class Replicated(Connected):
    """Mixed into the class of every module that data_parallel has changed."""

    _engine: Engine

    cannot_be_pickled = (
        "a data-parallel module holds connections and cannot be pickled; save model.state_dict(), with "
        "torch.distributed.checkpoint or torch.save, and load it into a freshly made model"
    )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._engine.copy_shards(memo)
        return super().__deepcopy__(memo)


class Root(Replicated):
    """The model itself."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward."""
        with self._engine.forward(self.training):  # pyright: ignore[reportAttributeAccessIssue]
            outputs = super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return self._engine.watch(outputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, backward passes only accumulate gradients on each rank; the first one outside exchanges their sum."""
        with self._engine.no_sync():
            yield


class Sharded(Replicated):
    """A module with sharded parameters of its own."""

    _members: dict[str, Member]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, which sees whole values."""
        with self._engine.computing():
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


class Linear(Replicated):
    """An nn.Linear with a unit of its own."""

    _fused: Fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias``"""
        if not self._fused.takes(x):
            return super().forward(x)  # pyright: ignore[reportAttributeAccessIssue]
        return self._fused(x, self.bias)  # pyright: ignore[reportAttributeAccessIssue]


def alias_shards(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A state_dict hook: what is written into a shard's local tensor, as DCP does, counts as written to the parameter.

    DTensor.detach, which state_dict calls, would give the local tensor a version of its own.
    """
    for name in module._members:
        held: Any = module._parameters[name]
        if prefix + name in state and state[prefix + name] is not held:  # which keep_vars asks for
            state[prefix + name] = DTensor(held._local_tensor.detach(), held._spec, requires_grad=False)  # pyright: ignore[reportCallIssue]


def _shown(name: str) -> property:
    """A parameter as an attribute: its value while something computes, else what the optimizer steps on."""

    def get(self: Any) -> Any:
        held, member = self._parameters[name], self._members[name]
        if held is not member.parameter or not self._engine.is_computing:  # others may put tensors there for a while
            return held
        return self._engine.value(member)

    return property(get)


@cache
def _combined(mixins: tuple[type, ...], base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    space: dict[str, Any] = {"__module__": base.__module__, "__doc__": base.__doc__, "__qualname__": base.__qualname__}
    made: Any = type(base.__name__, (*mixins, base), space | {name: _shown(name) for name in names})
    inner = made.forward

    @wraps(base.forward)  # whose signature others ask for
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs)

    made.forward = forward
    return made


def become(module: nn.Module, *mixins: type, names: tuple[str, ...] = (), **state: Any) -> None:
    """Makes ``module`` one of ``mixins`` as well, with attributes ``state``; ``names`` are parameters that it shows."""
    fresh = tuple(mixin for mixin in mixins if not isinstance(module, mixin))
    module.__class__ = _combined(fresh, type(module), names)
    for name, value in state.items():
        object.__setattr__(module, name, value)
