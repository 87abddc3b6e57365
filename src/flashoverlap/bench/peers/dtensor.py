"""torch's own tensor parallelism: modules parallelized with DTensor, sequence-sharded input and output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from ..contestant import Contestant
from ..mlp import Mlp


class FeedForward(nn.Module):
    """The MLP as anyone would write it, with the full weights of a case."""

    def __init__(self, case: Mlp) -> None:
        super().__init__()
        self.act: Callable[[torch.Tensor], torch.Tensor] = getattr(nn.functional, case.shape.activation)
        self.up, self.down = _linear(case.full["up"]), _linear(case.full["down"])
        self.gate = _linear(case.full["gate"]) if case.shape.gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output for all rows of x."""
        if self.gate is None:
            return self.down(self.act(self.up(x)))
        return self.down(self.act(self.gate(x)) * self.up(x))


def _linear(weight: torch.Tensor) -> nn.Linear:
    """A linear of this weight, without a bias."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    made.weight = nn.Parameter(weight.clone())
    return made


class DTensorMlp(Contestant):
    """ColwiseParallel, RowwiseParallel and one gather of the input in front of both column linears."""

    def __init__(self, case: Mlp, group: Any) -> None:
        mesh = DeviceMesh.from_group(group, "cpu")
        plan = {
            "": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
            "up": ColwiseParallel(),
            "gate": ColwiseParallel(),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        if not case.shape.gated:
            del plan["gate"]
        self.module: Any = FeedForward(case)
        for name, style in plan.items():
            parallelize_module(self.module.get_submodule(name), mesh, style)
        weights = {name: self.module.get_submodule(name).weight for name in plan if name}
        self.leaves = {"x": case.leaves["x"].detach().clone().requires_grad_(), **weights}

    def forward(self) -> torch.Tensor:
        """Own rows of the output."""
        return wait(self.module(self.leaves["x"]))

    def backward(self, out: torch.Tensor, grad: torch.Tensor) -> None:
        """Runs the backward pass and waits for the gradient of x, which is handed out while under way."""
        out.backward(grad)
        for leaf in self.leaves.values():
            if leaf.grad is not None:
                wait(_local(leaf.grad))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Own parts of the gradients."""
        return {name: _local(grad) for name, grad in super().gradients().items()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, which may have been under way, arrived."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor.wait()
    return tensor


CONTESTANTS: dict[str, Callable[[Any, Any], Contestant]] = {"mlp": DTensorMlp}
