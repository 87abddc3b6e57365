"""transformers' own tensor parallelism, ``from_pretrained(path, tp_plan="auto")``: whole rows, all-reduced sums."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

from ..contestant import Contestant
from ..llama import config_of, exact
from .arriving import Arriving


def loaded(model: Any, group: Any) -> Any:
    """The model as rank 0 has it, saved and loaded again by all ranks as any user would.

    transformers makes its mesh of all ranks there are, so ``group`` has to hold them all.
    """
    folder = [tempfile.mkdtemp(prefix="flashoverlap-") if group.rank() == 0 else None]
    dist.broadcast_object_list(folder, group=group, group_src=0)
    assert folder[0] is not None
    if group.rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier(group=group)
    try:
        dtype = model.lm_head.weight.dtype
        found = LlamaForCausalLM.from_pretrained(folder[0], dtype=dtype, tp_plan="auto", attn_implementation="sdpa")
        return exact(found.train(), dtype)
    finally:
        dist.barrier(group=group)
        if group.rank() == 0:
            shutil.rmtree(folder[0])


class HfModel(Arriving):
    """The whole model."""

    def __init__(self, case: Any, group: Any) -> None:
        model, ids = loaded(case.model, group), case.ids
        super().__init__(lambda: model(input_ids=ids, labels=ids).loss, dict(model.named_parameters()))


class HfBlock(Arriving):
    """The decoder layer of a model of one layer: all rows in and all rows out on every rank, own rows compared."""

    def __init__(self, case: Any, group: Any) -> None:
        dense = LlamaForCausalLM(config_of(case.shape)).to(case.dtype)
        dense.model.layers[0].load_state_dict(case.layer.state_dict())
        layer = loaded(dense, group).model.layers[0]
        self._case = case
        self._rows: torch.Tensor | None = None
        x = case.x.clone().requires_grad_()
        leaves = {"x": x, **dict(layer.named_parameters())}
        super().__init__(lambda: layer(x, position_embeddings=case.positions), leaves)

    def forward(self) -> torch.Tensor:
        """Own rows of the output; all are there."""
        self._rows = super().forward()
        return torch.tensor_split(self._rows, self._case.world_size, 1)[self._case.rank]

    def backward(self, out: torch.Tensor, grad: torch.Tensor) -> None:
        """Runs the backward pass with the gradient of all rows."""
        assert self._rows is not None
        super().backward(self._rows, self._case.full_grad)
        self._rows = None

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients, of x for own rows."""
        found = super().gradients()
        return {**found, "x": self._case.own(found["x"])} if "x" in found else found


CONTESTANTS: dict[str, Callable[[Any, Any], Contestant]] = {"block": HfBlock, "model": HfModel}
