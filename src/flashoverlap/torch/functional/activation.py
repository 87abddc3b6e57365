"""Activations of an MLP, forward into a buffer and backward from what went in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten


class Activation:
    """An elementwise (or row-wise) function and its derivative.

    Args:
        function: "silu", "gelu" (the exact one), or any differentiable callable that maps ``[rows, features]`` to the
            same shape and dtype, row by row, without randomness and without parameters. It runs without autocast.

    Raises:
        ValueError: an unknown name, or a module whose own parameters want a gradient.
        TypeError: neither a name nor callable.
    """

    def __init__(self, function: str | Callable[[torch.Tensor], torch.Tensor]) -> None:
        if isinstance(function, str):
            if function not in ("silu", "gelu"):
                raise ValueError(f"mlp: unknown activation {function!r}; known: silu, gelu, or a callable")
        elif not callable(function):
            raise TypeError(f"mlp: activation must be 'silu', 'gelu' or a callable, not {function!r}")
        elif isinstance(function, torch.nn.Module) and any(p.requires_grad for p in function.parameters()):
            raise ValueError(f"mlp: activation {function!r} has parameters, which would get no gradient; freeze them")
        self.function: Any = function
        self.own = not isinstance(function, str)
        self.name = function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)

    def into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """``out = function(x)``; ``out`` may be ``x``."""
        if self.function == "silu":
            _aten.silu.out(x, out=out)
        elif self.function == "gelu":
            _aten.gelu.out(x, out=out)
        else:
            result = self._call(x)
            if result.shape != x.shape or result.dtype != x.dtype:
                raise ValueError(
                    f"mlp: {self.name} turned {x.dtype} {list(x.shape)} into {result.dtype} {list(result.shape)}"
                )
            out.copy_(result)

    def backward_into(self, out: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
        """``out = grad * function'(x)``; ``out`` may be ``grad``."""
        if self.function == "silu":
            _aten.silu_backward.grad_input(grad, x, grad_input=out)
        elif self.function == "gelu":
            _aten.gelu_backward.grad_input(grad, x, grad_input=out)
        else:
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                result = self._call(leaf)
            (gradient,) = torch.autograd.grad(result, leaf, grad)
            out.copy_(gradient)

    def _call(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return self.function(x)
