"""What all modules of a parallelized model share, and how a module becomes one of them.

[Note: classes] A module is changed by giving it a subclass of its class, as FSDP2 does, and not by a closure over it:
a deep copy then works on its own parameters, ``isinstance`` stays true, and hooks and attributes stay where they were.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...overlap import Overlap
from ...report import placed
from ..connected import Connected
from ..functional import sum_gradient
from .axes import Axes, Axis


class Parallel:
    """How one model is parallelized: the same object in all its modules and in their deep copies.

    Args:
        axes: the mesh that parameters are DTensors on, and what its dimensions are for.
        sequence_parallel: whether rows are sharded outside the linears.
        attention: None; "query_split" where attention is to hide the scatter that follows it; "ulysses" where rows are
            sharded over ``axes.up``, and attention sees all rows of own heads.
        overlap: how operators are to hide their communication.

    Attributes:
        up: of the axes.
        group: what the operators of tensor parallelism are called on.
        rank: of this process in that group.
        world_size: of that group.
        averages_over_up: whether gradients become means over up behind the backward pass, as data_parallel has it;
            otherwise they are summed where autograd comes to them.
    """

    def __init__(self, axes: Axes, *, sequence_parallel: bool, attention: str | None, overlap: Overlap) -> None:
        self.axes, self.up = axes, axes.up
        self.group, self.rank, self.world_size = axes.tp
        self.sequence_parallel, self.attention, self.overlap = sequence_parallel, attention, overlap
        self.averages_over_up = False
        self.outer_random: list[torch.Tensor] = []  # see random.py

    @property
    def call(self) -> dict[str, Any]:
        """The keyword arguments that every operator takes, to be called on the ranks of tensor parallelism."""
        return {"group": self.group, "overlap": self.overlap}

    def along(self, axis: Axis) -> dict[str, Any]:
        """The same, to be called on the ranks of an axis."""
        return {"group": axis.group, "overlap": self.overlap}

    def __deepcopy__(self, memo: Any) -> Parallel:
        return self  # a process group cannot be copied, and need not be


class Parallelized(Connected, nn.Module):
    """Mixed into the class of every module that a plan has changed."""

    _parallel: Parallel
    _path: str = ""  # in the model, for the report
    keeps_name = False
    """Whether its class has the name of the module's own, which others write into files."""
    takes_one = True
    """Whether the module takes one tensor and nothing else."""
    cannot_be_pickled = (
        "a parallelized module holds a process group and cannot be pickled; save model.state_dict(), with "
        "torch.distributed.checkpoint or torch.save, and load it into a freshly parallelized model"
    )


@cache
def _combined(mixin: type[Parallelized], base: type[nn.Module]) -> type[nn.Module]:
    space: dict[str, Any] = {"__module__": mixin.__module__, "__doc__": base.__doc__}
    if mixin.forward is not nn.Module.forward:
        signature = inspect.signature(base.forward)

        @wraps(base.forward)  # whose signature others ask for
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not args and mixin.takes_one:  # by the name that the module has for it
                args, kwargs = signature.bind(self, **kwargs).args[1:], {}
            with placed(self._path):
                return mixin.forward(self, *args, **kwargs)

        space["forward"] = forward
    return type(base.__name__ if mixin.keeps_name else f"{mixin.__name__}{base.__name__}", (mixin, base), space)


def become(module: nn.Module, mixin: type[Parallelized], parallel: Parallel, **state: Any) -> None:
    """Makes ``module`` one of ``mixin`` ([Note: classes]), with attributes ``state``."""
    module.__class__ = _combined(mixin, type(module))
    module._parallel = parallel  # pyright: ignore[reportArgumentType]
    for name, value in state.items():
        object.__setattr__(module, name, value)


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of the dense model, whole on every rank: shards gathered, parts of fused weights joined.

    All ranks of the mesh call together. The ``load_state_dict`` of a dense model takes it.
    """
    found: dict[str, torch.Tensor] = {}
    state = model.state_dict()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.ParameterList):
            parts = [whole_value(state.pop(f"{name}.{index}")) for index in range(len(module))]
            # parts differ in size along one dimension at most, which is that of a linear's outputs
            found[name] = torch.cat(parts, parts[0].dim() - 1 if _is_conv1d(model, name) else 0)
    found |= {name: whole_value(tensor) for name, tensor in state.items()}
    return found


def _is_conv1d(model: nn.Module, name: str) -> bool:
    owner: Any = model.get_submodule(name.rpartition(".")[0])
    return owner._transposed and name.endswith("weight")


def whole_value(tensor: Any) -> Any:
    """All of a DTensor, gathered; anything else as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(parameter: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """The part of a parameter that is here, used on rows that no other up has: its gradient is summed over up."""
    here = _here(parameter)
    if parallel.up is None or not here.requires_grad:
        return here
    if not parallel.averages_over_up:
        return sum_gradient(here, **parallel.along(parallel.up))
    ranks, here = parallel.up.size, here.view_as(here)
    here.register_hook(lambda gradient: gradient * ranks)
    return here


def whole(parameter: torch.Tensor, parallel: Parallel, summed: bool) -> torch.Tensor:
    """A replicated parameter; with ``summed`` its gradient is the sum over ranks, each of which saw a part."""
    if not summed:
        return _here(parameter)
    here = local(parameter, parallel)
    return sum_gradient(here, **parallel.call) if parallel.world_size > 1 else here


def _here(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@contextmanager
def replaced(tensors: Mapping[tuple[nn.Module, str], torch.Tensor]) -> Iterator[None]:
    """Lets modules see plain tensors where they have parameters, for the length of a call; not for two threads."""
    kept = {(module, name): module._parameters[name] for module, name in tensors}
    for (module, name), tensor in tensors.items():
        module._parameters[name] = tensor  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        for (module, name), parameter in kept.items():
            module._parameters[name] = parameter
