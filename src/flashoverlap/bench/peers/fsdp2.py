"""torch's FSDP2: fully_shard on every layer and on the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ..contestant import Contestant
from ..data_parallel import Steps


class Fsdp2(Steps):
    """Parameters are dropped after forward where they are to be sharded, and kept where gradients are."""

    def __init__(self, case: Any, group: Any) -> None:
        model = copy.deepcopy(case.model)
        settings: dict[str, Any] = {
            "mesh": DeviceMesh.from_group(group, "cpu"),
            "reshard_after_forward": case.shape.shard == "parameters",
        }
        for layer in _layers(model):
            fully_shard(layer, **settings)
        fully_shard(model, **settings)
        super().__init__(case, model)


def _layers(model: Any) -> list[nn.Module]:
    if isinstance(model, nn.Sequential):
        return [layer for layer in model if isinstance(layer, nn.Linear)]
    return list(model.model.layers)


CONTESTANTS: dict[str, Callable[..., Contestant]] = {"dp": Fsdp2, "dp_llm": Fsdp2}
