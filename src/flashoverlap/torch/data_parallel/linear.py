"""A linear layer whose weight gradient leaves block by block, and whose weight arrives block by block.

T rows of x, weight [N, K] on n ranks, block j the rows of the weight that rank j owns

forward   y[:, j] = x W_j^T + b_j      own block first, others as they arrive; one matmul where all are there
wgrad     dW_j    = dy[:, j]^T x       blocks of others first, each sent as soon as it is made; own block last
dgrad     dx      = dy W               behind the exchange of dW
dbias     db      = sum of dy's rows

memory    x is kept for backward, as nn.Linear does; a streamed weight is gathered again for dgrad
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional

from ..functional.kernels import linear_into, matmul_into
from .flight import Use
from .gradients import Gradients
from .stream import Stream
from .unit import Unit
from .values import Values

_CHUNKS = 4  # of the matmul behind which sums come and go


class Fused:
    """What a linear needs to know of its weight: its unit, who sends its gradient, and who brings its value."""

    def __init__(self, unit: Unit, gradients: Gradients, source: Values | Stream | None) -> None:
        self.unit, self.gradients, self.source = unit, gradients, source

    def takes(self, x: Any) -> bool:
        """Whether the matmuls can be cut: a plain tensor, and a gradient that will be wanted."""
        weight = self.unit.members[0].leaf
        return type(x) is torch.Tensor and x.device == weight.device and x.dim() > 0 and x.shape[-1] == weight.shape[1]

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x @ weight.T + bias``, under autocast in its dtype."""
        weight = self.unit.members[0].leaf
        if torch.is_autocast_enabled(x.device.type) and x.is_floating_point() and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        elif x.dtype != weight.dtype:
            return functional.linear(x, weight, bias)  # which says what is wrong
        return _Linear.apply(self, x, weight, bias)  # pyright: ignore[reportReturnType]

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The output, computed block by block where the weight is still coming."""
        if self.source is None:
            return functional.linear(x, weight.to(x.dtype), bias)
        made: torch.Tensor = x.new_empty(*x.shape[:-1], weight.shape[0])
        flat, rows = made.view(-1, weight.shape[0]), x.reshape(-1, x.shape[-1])

        def use(owner: int, start: int, stop: int) -> None:
            linear_into(
                flat[:, start:stop], rows, weight[start:stop].to(x.dtype), None if bias is None else bias[start:stop]
            )

        if not self.source.need(self.unit, self._rows(use)):
            made = functional.linear(x, weight.to(x.dtype), bias)
        self.source.drop(self.unit)
        return made

    def input_gradient(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The gradient ``[T, K]`` of the input, summed block by block where the weight is still coming."""
        made: torch.Tensor = grad.new_empty(grad.shape[0], weight.shape[1])
        if self.source is None:
            weight = weight.to(grad.dtype)
            for rows, out in zip(grad.chunk(_CHUNKS), made.chunk(_CHUNKS), strict=True):
                matmul_into(out, rows, weight, 0.0)
                self.gradients.poll()  # what has been summed is to leave meanwhile
            return made
        begun = False

        def use(owner: int, start: int, stop: int) -> None:
            nonlocal begun
            matmul_into(made, grad[:, start:stop], weight[start:stop].to(grad.dtype), float(begun))
            begun = True

        if not self.source.need(self.unit, self._rows(use)):
            made = grad @ weight.to(grad.dtype)
        self.source.drop(self.unit)
        return made

    def differentiable(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The same by an operator that has derivatives of its own, for which the weight stays."""
        if self.source is not None:
            self.source.need(self.unit)
            self.source.keep(self.unit)
        return grad @ weight.to(grad.dtype)

    def _rows(self, use: Use) -> Use:
        """``use`` with rows of the whole weight, left out where there are none."""
        starts = self.unit.members[0].starts

        def of_block(owner: int, start: int, stop: int) -> None:
            if start < stop:
                use(owner, starts[owner] + start, starts[owner] + stop)

        return of_block

    def weight_gradient(self, grad: torch.Tensor, x: torch.Tensor) -> bool:
        """Computes the weight's gradient block by block and sends it; False where autograd is to have it."""

        def product(out: torch.Tensor, start: int, stop: int, beta: float, alpha: float) -> None:
            part = grad[:, start:stop].t()
            if part.dtype == out.dtype:
                torch.addmm(out, part, x, beta=beta, alpha=alpha, out=out)
            elif beta:
                out.mul_(beta).add_(torch.mm(part, x), alpha=alpha)
            else:
                torch.mul(torch.mm(part, x), alpha, out=out)

        return self.gradients.compute(self.unit, product)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fused: Fused, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.fused = fused
        if bias is not None:
            ctx.bias_dtype, bias = bias.dtype, bias.to(x.dtype)
        with _no_autocast(x.device.type):
            y = fused.forward(x, weight, bias)
        ctx.save_for_backward(x, weight)
        ctx.accumulator = torch.autograd.graph.get_gradient_edge(weight).node if weight.requires_grad else None
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad = grad_outputs[0]
        flat, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        ctx.fused.unit.tokens, ctx.fused.unit.chained = len(rows), needs_x
        dx = dweight = dbias = None
        with _no_autocast(x.device.type):
            if needs_weight and not (_goes_to_the_leaf(ctx.accumulator) and ctx.fused.weight_gradient(flat, rows)):
                dweight = (flat.t() @ rows).to(weight.dtype)
            if needs_x:
                dx = (
                    ctx.fused.differentiable(flat, weight)
                    if torch.is_grad_enabled()
                    else ctx.fused.input_gradient(flat, weight)
                )
                dx = dx.view(x.shape)
            if needs_bias:
                dbias = flat.sum(0).to(ctx.bias_dtype)
        return None, dx, dweight, dbias


def _no_autocast(device: str) -> Any:
    """Within, products have the dtype of their factors."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _goes_to_the_leaf(accumulator: Any) -> bool:
    """Whether this pass accumulates into the weight: not under torch.autograd.grad, nor where derivatives are to have
    derivatives of their own."""
    if torch.is_grad_enabled():
        return False
    try:
        return torch._C._will_engine_execute_node(accumulator)  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError:  # what torch says where torch.autograd.grad is to give this very gradient back
        return False
