"""Backward passes that are differentiable once, and say so when a second derivative is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

Backward = Callable[..., tuple[Any, ...]]


class _Refuse(torch.autograd.Function):
    """Passes gradients on and stands in the way of their own derivatives."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise RuntimeError("second derivatives of overlapped operators are not supported")


def differentiable_once(backward: Backward) -> Backward:
    """Makes a static ``backward`` refuse second derivatives.

    torch's ``once_differentiable`` hangs its refusal on detached tensors: a gradient with respect to the inputs alone
    does not pass there, and the second derivative would be missing from it in silence.
    """

    @wraps(backward)
    def once(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            grads = backward(ctx, *grad_outputs)
        if not torch.is_grad_enabled():
            return grads
        at = [index for index, grad in enumerate(grads) if isinstance(grad, torch.Tensor)]
        leads_here = [tensor for tensor in (*grad_outputs, *ctx.saved_tensors) if tensor is not None]
        refused = _Refuse.apply(len(at), *(grads[index] for index in at), *leads_here)
        replaced = dict(zip(at, refused, strict=True))  # pyright: ignore[reportArgumentType]
        return tuple(replaced.get(index, grad) for index, grad in enumerate(grads))

    return once
