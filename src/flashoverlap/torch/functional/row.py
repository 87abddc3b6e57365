"""linear_reduce_scatter: the row-parallel linear layer before a scatter of its output rows.

M rows in all, n ranks, rank r, N output features
x            [M, K_r]      input features of rank r
weight_shard [N, K_r]
z_shard      [M_r, N]      rows of rank r (those of torch.tensor_split)

forward   z_r  = sum_q x_q,r W_q^T + b   scatter side: others' rows first, own rows last; b is added once
dgrad     dx_j = dz_j W_r                gather side: own rows first
wgrad     dW_r = dz^T x                  one matmul over all rows, of the same gather
dbias     db   = sum of dz's rows        over all rows on every rank, so equal on all

memory    x is kept for backward (it is local), dz is gathered into staging
"""

from __future__ import annotations

from typing import Any

import torch

from ...overlap import Overlap
from ...patterns import split_sizes
from ..call import Call, eager
from ..check import check_layer, grads, shape
from ..layout import around, flatten
from ..pieces import Gathered
from ..transport import refusing, transport_of
from .derivative import differentiable_once
from .kernels import matmul, matmul_into

_OP = "linear_reduce_scatter"


@eager
def linear_reduce_scatter(
    x: torch.Tensor,
    weight_shard: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Any,
    dim: int = -2,
    overlap: Overlap = Overlap(),
) -> torch.Tensor:
    """Sums ``x @ weight_shard.T`` over the ranks and keeps the own rows, each piece sent while the next is computed.

    Args:
        x: ``[..., M, K_r]``, all rows of the own features.
        weight_shard: ``[N, K_r]``.
        bias: ``[N]``, the full bias, equal on all ranks; added once.
        group: process group or one-dimensional DeviceMesh.
        dim: dimension of ``x`` whose rows are scattered, not the last.
        overlap: how to overlap.

    Returns:
        The own rows ``[..., M_r, N]``: those that ``torch.tensor_split`` gives this rank.

    Raises:
        ValueError, TypeError: on every rank before anything moves, for arguments that do not fit together or differ
            between ranks.
        PeerError: a peer refused the call, died or stalled.
    """
    transport = transport_of(group, _OP, x)
    with refusing(transport):
        inputs, row_dim = check_layer(_OP, x, weight_shard, bias, dim, overlap)
    call = Call(_OP, transport, overlap, inputs[0])
    outer, rows, inner = around(inputs[0].shape, row_dim)
    flags = grads(x, weight_shard, bias)
    shared = f"outer={outer} rows={rows} inner={inner} out={inputs[1].shape[0]} bias={bias is not None} {flags}"
    shown = f"x {shape(inputs[0])} dim {row_dim}, weight {shape(inputs[1])}, bias {shape(bias)}, {flags}"
    call.agree("", shared, shown, shard=inputs[1].shape[1])
    return _LinearReduceScatter.apply(call, row_dim, *inputs)  # pyright: ignore[reportReturnType]


class _LinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, dim: int, *tensors: Any) -> torch.Tensor:
        x, weight, bias = tensors
        outer, full, inner = around(x.shape, dim)
        owned = tuple(split_sizes(full, call.world_size))
        flow, columns = "matmul_reduce_scatter", weight.shape[0]
        sizes = {"features": call.shard, "out": columns}
        choice, rows = call.choose(flow, outer, owned, inner, sizes)
        flat = flatten(x)
        z = x.new_empty(*x.shape[:dim], owned[call.rank], *x.shape[dim + 1 : -1], columns)
        with call.leased() as lease:
            scattered = call.scattered(rows, choice, flatten(z), lease, bias)
            transposed = weight.t()

            def product(names: tuple[str, ...], target: torch.Tensor, first: int, beta: float) -> None:
                for start, stop, natural in rows.segments(names):
                    part = flat[natural : natural + stop - start]
                    matmul_into(target[start - first : stop - first], part, transposed, beta)

            kernels = {"mm": lambda op: scattered.multiply(op, product), "": scattered.add}
            call.run(flow, choice, rows.rows, {"p": columns * x.itemsize}, scattered.tensor, kernels)
            scattered.finish()
        ctx.call, ctx.owned, ctx.dim = call, owned, dim
        ctx.save_for_backward(x, weight)
        return z

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: Call = ctx.call
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[2:]
        outer, _, inner = around(x.shape, ctx.dim)
        flow = "row_backward" + ("" if needs_weight or needs_bias else "-w") + ("" if needs_x else "-y")
        call.agree("backward", f"{flow} owned={ctx.owned}", f"{flow}, rows {list(ctx.owned)}")
        columns = weight.shape[0]
        sizes = {"features": call.shard, "out": columns}
        choice, rows = call.choose(flow, outer, ctx.owned, inner, sizes)
        own = flatten(grad_outputs[0])
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
        dweight = dbias = None
        with call.leased() as lease:
            gathered = Gathered(rows, call.rank, own, lease.tensor(rows.total, columns, x.dtype))

            def mm(op: Any) -> None:
                assert dx is not None
                flat = flatten(dx)
                for part, start, stop in gathered.natural_runs(op.reads):
                    matmul_into(flat[start:stop], part, weight, 0.0)

            def wgrad(op: Any) -> None:
                nonlocal dweight, dbias
                dz = rows.to_natural(gathered.all())
                dweight = matmul(dz.t(), flatten(x)) if needs_weight else None
                dbias = dz.sum(0) if needs_bias else None

            width = columns * x.itemsize
            call.run(flow, choice, rows.rows, {"x": width}, gathered.tensor, {"mm": mm, "wgrad": wgrad}, "backward")
        return None, None, dx, dweight, dbias
