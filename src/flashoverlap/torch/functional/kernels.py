"""The local matmuls, written so that they go straight into their place."""

from __future__ import annotations

import torch


def linear_into(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """``out[M, N] = x[M, K] @ weight[N, K].T + bias[N]``."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def matmul_into(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, beta: float) -> None:
    """``out[M, K] = x[M, N] @ weight[N, K] + beta * out``; with ``beta=0`` what was in ``out`` does not matter."""
    if beta:
        torch.addmm(out, x, weight, out=out)
    else:
        torch.mm(x, weight, out=out)


def sum_into(out: torch.Tensor, x: torch.Tensor, beta: float) -> None:
    """``out[M, 1] = sum of the columns of x[M, N] + beta * out``."""
    if beta:
        out += x.sum(1, keepdim=True)
    else:
        torch.sum(x, 1, keepdim=True, out=out)


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x @ y`` in the dtype of both: backward may run inside an autocast region that forward was not in."""
    return torch.mm(x, y, out=x.new_empty(x.shape[0], y.shape[1]))
