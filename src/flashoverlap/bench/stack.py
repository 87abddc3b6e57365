"""A stack of linears."""

from __future__ import annotations

import copy

import torch
from torch import nn

from .data_parallel import DataParallel
from .shapes import StackShape


class Stack(DataParallel):
    """Linears without biases, with GELU between them.

    The loss is linear in the output, with a random coefficient for each number, and what is between is smooth: so that
    roundings do not grow from step to step.
    """

    lr = 1e-4

    def __init__(self, shape: StackShape, dtype: torch.dtype, rank: int, world_size: int) -> None:
        super().__init__(shape, dtype, rank, world_size)
        generator = torch.Generator().manual_seed(shape.layers + shape.hidden + shape.tokens)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        modules: list[nn.Module] = []
        for _ in range(shape.layers):
            layer = nn.Linear(shape.hidden, shape.hidden, bias=False, device="meta")
            weight = (
                normal(shape.hidden, shape.hidden) * (2.35 / shape.hidden) ** 0.5
            )  # keeps what passes GELU as large
            layer.weight = nn.Parameter(weight.to(dtype))
            modules += [layer, nn.GELU()]
        self.model = nn.Sequential(*modules[:-1])
        rows = (shape.tokens, shape.hidden)
        large = (shape.tokens / 256) ** 0.5  # so that gradients, sums of random terms, are as large for any number
        self._rows = [(normal(*rows).to(dtype), (large * normal(*rows)).to(dtype)) for _ in range(world_size)]

    def loss(self, model: nn.Module, rank: int) -> torch.Tensor:
        """The weighted sum of the output, over the number of rows."""
        dtype = next(model.parameters()).dtype
        x, coefficients = (rows.to(dtype) for rows in self._rows[rank])
        return (model(x) * coefficients).sum() / self.shape.tokens

    def in_float64(self) -> nn.Module:
        """A copy in float64."""
        return copy.deepcopy(self.model).double()
