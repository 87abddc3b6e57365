"""Activations of an MLP, forward into a buffer and backward from what went in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_aten = torch.ops.aten

# by name: function(x, out=out), and derivative(grad, x, grad_input=out)
_KNOWN: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "silu": (_aten.silu.out, _aten.silu_backward.grad_input),
    "gelu": (_aten.gelu.out, _aten.gelu_backward.grad_input),
    "gelu_tanh": (
        partial(_aten.gelu.out, approximate="tanh"),
        partial(_aten.gelu_backward.grad_input, approximate="tanh"),
    ),
    "relu": (_aten.relu.out, partial(_aten.threshold_backward.grad_input, threshold=0)),
}


class Activation:
    """An elementwise (or row-wise) function and its derivative.

    Args:
        function: "silu", "gelu" (the exact one), "gelu_tanh" (its approximation by tanh), "relu", or any differentiable
            callable that maps ``[rows, features]`` to the same shape and dtype, row by row, without randomness, not in
            place, and without trainable tensors of its own. It runs without autocast.

    Raises:
        ValueError: an unknown name.
        TypeError: neither a name nor callable.
    """

    def __init__(self, function: str | Callable[[torch.Tensor], torch.Tensor]) -> None:
        if isinstance(function, str):
            if function not in _KNOWN:
                raise ValueError(f"mlp: unknown activation {function!r}; known: {', '.join(_KNOWN)}, or a callable")
        elif not callable(function):
            raise TypeError(f"mlp: activation must be one of {', '.join(_KNOWN)} or a callable, not {function!r}")
        self.function: Any = function
        self.own = not isinstance(function, str)
        self.name = function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)

    def try_out(self, features: int, like: torch.Tensor) -> None:
        """Runs a callable of the caller's on one row of zeros and refuses what could not work.

        Raises:
            TypeError: it returns no tensor.
            ValueError: another shape or dtype, a change in place, or parameters that would get no gradient.
        """
        if not self.own:
            return
        wanted = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.zeros(1, features, dtype=like.dtype, device=like.device)
            version = x._version
            result = self._call(x)
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"mlp: activation {self.name} returned {type(result).__name__}, not a tensor")
        if x._version != version:
            raise ValueError(f"mlp: activation {self.name} works in place; what entered it is needed for backward")
        self._check(result, x)
        if wanted and result.requires_grad:
            raise ValueError(f"mlp: activation {self.name} has trainable parameters, which would get no gradient")

    def _check(self, result: torch.Tensor, x: torch.Tensor) -> None:
        if result.shape != x.shape or result.dtype != x.dtype:
            raise ValueError(
                f"mlp: {self.name} turned {x.dtype} {list(x.shape)} into {result.dtype} {list(result.shape)}"
            )

    def into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """``out = function(x)``; ``out`` may be ``x``."""
        if not self.own:
            _KNOWN[self.function][0](x, out=out)
            return
        result = self._call(x)
        self._check(result, x)
        out.copy_(result)

    def backward_into(self, out: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
        """``out = grad * function'(x)``; ``out`` may be ``grad``."""
        if not self.own:
            _KNOWN[self.function][1](grad, x, grad_input=out)
            return
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            result = self._call(leaf)
        (gradient,) = torch.autograd.grad(result, leaf, grad)
        out.copy_(gradient)

    def _call(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return self.function(x)
