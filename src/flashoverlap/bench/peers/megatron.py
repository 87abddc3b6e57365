"""megatron-core's tensor parallelism with sequence parallelism: ColumnParallelLinear and RowParallelLinear on CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..contestant import Contestant
from ..mlp import Mlp

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of fused kernels that are not installed, and not wanted
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]
    from megatron.core.model_parallel_config import ModelParallelConfig  # pyright: ignore[reportMissingImports]
    from megatron.core.tensor_parallel.layers import (  # pyright: ignore[reportMissingImports]
        ColumnParallelLinear,
        RowParallelLinear,
    )


@contextmanager
def on_cpu() -> Iterator[None]:
    """Lets megatron-core make its buffers on the CPU: it asks for the current CUDA device by name."""
    kept = torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("cpu")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.cuda.current_device = kept


class MegatronMlp(Contestant):
    """The MLP of megatron-core: gate and up are one column-parallel linear, so that one gather feeds both."""

    def __init__(self, case: Mlp, group: Any) -> None:
        self._act: Callable[[torch.Tensor], torch.Tensor] = getattr(torch.nn.functional, case.shape.activation)
        self._gated = case.shape.gated
        shape, leaves = case.shape, case.leaves
        settings = {
            "config": ModelParallelConfig(
                tensor_model_parallel_size=case.world_size,
                sequence_parallel=case.world_size > 1,
                use_cpu_initialization=True,
                perform_initialization=False,
                gradient_accumulation_fusion=False,
                params_dtype=case.grad.dtype,
            ),
            "init_method": torch.nn.init.zeros_,
            "bias": False,
            "skip_bias_add": False,
            "tp_group": group,
        }
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=case.world_size)
        columns = shape.ffn * (2 if self._gated else 1)
        with on_cpu():
            self.column: Any = ColumnParallelLinear(shape.hidden, columns, gather_output=False, **settings)
            self.row: Any = RowParallelLinear(shape.ffn, shape.hidden, input_is_parallel=True, **settings)
        raised = [leaves["gate"], leaves["up"]] if self._gated else [leaves["up"]]
        self.column.weight.data.copy_(torch.cat([leaf.detach() for leaf in raised]))
        self.row.weight.data.copy_(leaves["down"].detach())
        x = leaves["x"].detach().clone().requires_grad_()
        self.leaves = {"x": x, "raised": self.column.weight, "down": self.row.weight}

    def forward(self) -> torch.Tensor:
        """Own rows of the output; megatron-core wants ``[sequence, batch, features]``."""
        with on_cpu():
            hidden = self.column(self.leaves["x"].unsqueeze(1))[0]
            if self._gated:
                gate, up = hidden.chunk(2, dim=-1)
                active = self._act(gate) * up
            else:
                active = self._act(hidden)
            return self.row(active)[0].squeeze(1)

    def backward(self, out: torch.Tensor, grad: torch.Tensor) -> None:
        """Runs the backward pass."""
        with on_cpu():
            out.backward(grad)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Own parts of the gradients, under the names of the case."""
        found = super().gradients()
        if "raised" in found:
            raised = found.pop("raised")
            found |= dict(zip(("gate", "up"), raised.chunk(2), strict=True)) if self._gated else {"up": raised}
        return found


CONTESTANTS: dict[str, Callable[[Any, Any], Contestant]] = {"mlp": MegatronMlp}
