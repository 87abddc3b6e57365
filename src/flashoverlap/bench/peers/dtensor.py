"""torch's own tensor parallelism: modules parallelized with DTensor, sequence-sharded between the linears."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from ..contestant import Contestant
from .arriving import Arriving


class FeedForward(nn.Module):
    """The MLP as anyone would write it, with the full weights of a case."""

    def __init__(self, case: Any) -> None:
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


class DTensorMlp(Arriving):
    """ColwiseParallel, RowwiseParallel and one gather of the input in front of both column linears."""

    def __init__(self, case: Any, group: Any) -> None:
        mesh = DeviceMesh.from_group(group, "cpu")
        plan = {
            "": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
            "up": ColwiseParallel(),
            "gate": ColwiseParallel(),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        if not case.shape.gated:
            del plan["gate"]
        module: Any = FeedForward(case)
        for name, style in plan.items():
            parallelize_module(module.get_submodule(name), mesh, style)
        weights = {name: module.get_submodule(name).weight for name in plan if name}
        x = case.leaves["x"].detach().clone().requires_grad_()
        super().__init__(lambda: module(x), {"x": x, **weights})

    def gradients(self) -> dict[str, torch.Tensor]:
        """Own parts of the gradients, since the case's leaves are plain tensors."""
        found = super().gradients()
        return {name: grad.to_local() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def layer_plan(local: bool) -> dict[str, Any]:
    """The table for a Llama decoder layer whose input and output are sharded over the sequence.

    ``local``: whether the rows that a block adds to its input are plain tensors; else they are DTensors.
    """
    row = RowwiseParallel(output_layouts=Shard(1), use_local_output=local)
    return {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(  # one gather for queries, keys and values
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": row,
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": row,
    }


class DTensorBlock(Arriving):
    """transformers' decoder layer, by torch's styles."""

    def __init__(self, case: Any, group: Any) -> None:
        layer = copy.deepcopy(case.layer)
        parallelize_module(layer, DeviceMesh.from_group(group, "cpu"), layer_plan(local=True))
        x = case.own(case.x).requires_grad_()
        super().__init__(
            lambda: layer(x, position_embeddings=case.positions), {"x": x, **dict(layer.named_parameters())}
        )


class DTensorModel(Arriving):
    """transformers' model, by torch's styles, with the loss over the sharded vocabulary.

    Between the linears rows are DTensors, so that the model sees the length of the whole sequence.
    """

    def __init__(self, case: Any, group: Any) -> None:
        model, ids = copy.deepcopy(case.model), case.ids
        plan: dict[str, Any] = {
            "model.embed_tokens": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
            ),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        }
        plan |= {f"model.layers.*.{name}": style for name, style in layer_plan(local=False).items()}
        parallelize_module(model, DeviceMesh.from_group(group, "cpu"), plan)
        super().__init__(lambda: self._loss(model, ids), dict(model.named_parameters()))

    @staticmethod
    def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
        with loss_parallel():
            loss = model(input_ids=ids, labels=ids).loss
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def backward(self, out: torch.Tensor, grad: torch.Tensor) -> None:
        """Runs the backward pass of the sharded loss."""
        with loss_parallel():
            super().backward(out, grad)


CONTESTANTS: dict[str, Callable[[Any, Any], Contestant]] = {
    "mlp": DTensorMlp,
    "block": DTensorBlock,
    "model": DTensorModel,
}
