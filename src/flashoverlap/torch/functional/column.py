"""all_gather_linear: the column-parallel linear layer behind a gather of its input rows.

M rows of x in all, K features, n ranks, rank r; shards carry the name of what is cut
x_shard      [M_r, K]      rows of rank r (those of torch.tensor_split)
weight_shard [N_r, K]      output features of rank r
y            [M, N_r]

forward   y_j  = x_j W_r^T         gather side: own rows first, others as they arrive
dgrad     dx_r = sum_q dy_q,r W_q  scatter side: others' rows first
wgrad     dW_r = dy^T x            one matmul over all rows, of x gathered anew while dgrad computes
dbias     db_r = sum of dy's rows  local

memory    x_shard is kept for backward (M / n rows), or the gathered x (M rows) with save_gathered=True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...overlap import Overlap
from ..call import Call, eager
from ..check import check_layers, grads, shape
from ..layout import Layout, around, flatten
from ..pieces import Gathered
from ..transport import refusing, transport_of
from .derivative import differentiable_once
from .kernels import linear_into, matmul, matmul_into

_OP = "all_gather_linear"


@eager
def all_gather_linear(
    x_shard: torch.Tensor,
    weight_shard: torch.Tensor | Sequence[torch.Tensor],
    bias_shard: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    *,
    group: Any,
    dim: int = -2,
    overlap: Overlap = Overlap(),
    save_gathered: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Gathers the rows of ``x`` under the matmuls that use them: ``y = all_gather(x) @ weight.T + bias``.

    Args:
        x_shard: own rows ``[..., M_r, K]``; ``dim`` is the dimension of the rows.
        weight_shard: ``[N_r, K]``, or a sequence of such (q, k, v; gate, up): one gather feeds them all.
        bias_shard: ``[N_r]``, or a sequence as long as the weights, with None where there is none.
        group: process group or one-dimensional DeviceMesh.
        dim: dimension of ``x_shard`` that is sharded, not the last: -2 for ``[B, S, K]``, 0 for ``[S, B, K]``.
        overlap: how to overlap.
        save_gathered: keep the gathered rows for backward instead of gathering them again.

    Returns:
        ``[..., M, N_r]``, or a tuple of these for a sequence of weights.

    Raises:
        ValueError, TypeError: on every rank before anything moves, for arguments that do not fit together or differ
            between ranks.
        PeerError: a peer refused the call, died or stalled.
    """
    transport = transport_of(group, _OP, x_shard)
    with refusing(transport):
        if not isinstance(save_gathered, bool):
            raise TypeError(f"{_OP}: save_gathered must be True or False, not {save_gathered!r}")
        x, weights, biases, row_dim = check_layers(_OP, x_shard, weight_shard, bias_shard, dim, overlap)
    call = Call(_OP, transport, overlap, x)
    outer, rows, inner = around(x.shape, row_dim)
    flags = f"{grads(x, *weights, *biases)} save_gathered={save_gathered}"
    shared = f"outer={outer} inner={inner} features={x.shape[-1]} weights={len(weights)} {flags}"
    shown = f"x {shape(x)} dim {row_dim}, weight {', '.join(map(shape, weights))}, {flags}"
    owned = call.agree_rows(shared, shown, rows, sum(map(len, weights)))
    outputs = _AllGatherLinear.apply(call, owned, row_dim, save_gathered, len(weights), x, *weights, *biases)
    return tuple(outputs) if isinstance(weight_shard, Sequence) else outputs[0]


class _AllGatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, owned: tuple[int, ...], dim: int, save_gathered: bool, count: int, *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        x, weights, biases = tensors[0], tensors[1 : count + 1], tensors[count + 1 :]
        outer, _, inner = around(x.shape, dim)
        flow = "all_gather_matmul"
        sizes = {"features": x.shape[-1], "out": call.shard}
        choice, rows = call.choose(flow, outer, owned, inner, sizes)
        features = x.shape[-1]
        own = flatten(x)
        full = (*x.shape[:dim], sum(owned), *x.shape[dim + 1 : -1])
        outputs = tuple(x.new_empty(*full, weight.shape[0]) for weight in weights)
        flat = [flatten(y) for y in outputs]
        with call.leased() as lease:
            kept = save_gathered and call.differentiable and any(ctx.needs_input_grad[6 : 6 + count])
            buffer = x.new_empty(rows.total, features) if kept else lease.tensor(rows.total, features, x.dtype)
            gathered = Gathered(rows, call.rank, own, buffer)

            def mm(op: Any) -> None:
                for part, start, stop in gathered.natural_runs(op.reads):
                    for weight, bias, y in zip(weights, biases, flat, strict=True):
                        linear_into(y[start:stop], part, weight, bias)

            widths = {"x": features * x.itemsize, "y": sum(y.shape[-1] for y in flat) * x.itemsize}
            call.run(flow, choice, rows.rows, widths, gathered.tensor, {"mm": mm})
            saved = gathered.all() if kept else x
        ctx.call, ctx.owned, ctx.dim, ctx.kept, ctx.count = call, owned, dim, kept, count
        ctx.shape = x.shape
        ctx.save_for_backward(saved, *weights)
        return outputs

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: Call = ctx.call
        saved, *weights = ctx.saved_tensors
        needs = ctx.needs_input_grad[5:]
        needs_weight, needs_bias = needs[1 : ctx.count + 1], needs[ctx.count + 1 :]
        outer, _, inner = around(ctx.shape, ctx.dim)
        flat = [flatten(grad) for grad in grad_outputs]
        flow = "column_backward_saved" if ctx.kept else "column_backward"
        flow += ("" if any(needs_weight) else "-w") + ("" if needs[0] else "-z")
        dx, dweights = None, [None] * ctx.count
        if needs[0] or any(needs_weight):
            call.agree("backward", f"{flow} owned={ctx.owned}", f"{flow}, rows {list(ctx.owned)}")
            sizes = {"features": weights[0].shape[1], "out": call.shard}
            choice, rows = call.choose(flow, outer, ctx.owned, inner, sizes)
            dx, dweights = _column_backward(call, flow, choice, rows, flatten(saved), weights, flat, needs_weight)
        dx = dx.view(ctx.shape) if needs[0] and dx is not None else None
        dbiases = [grad.sum(0) if need else None for grad, need in zip(flat, needs_bias, strict=True)]
        return None, None, None, None, None, dx, *dweights, *dbiases


def _column_backward(
    call: Call,
    flow: str,
    choice: Any,
    rows: Layout,
    saved: torch.Tensor,
    weights: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    needs_weight: Sequence[bool],
) -> tuple[torch.Tensor, list[Any]]:
    """Runs the backward schedule: dx of the own rows ``[M_r, K]``, and the weight gradients that are needed.

    ``saved`` is the own shard of x, or all of x in piece order; ``grads`` are ``[M, N_r]`` in natural order.
    """
    features = weights[0].shape[1]
    dweights: list[Any] = [None] * len(weights)
    dx = saved.new_empty(rows.rows[call.rank], features)
    with call.leased() as lease:
        kept = flow.startswith("column_backward_saved")
        buffer = saved if kept else lease.tensor(rows.total, features, call.dtype)
        own = saved[rows.starts[call.rank] : rows.starts[call.rank + 1]] if kept else saved
        gathered = Gathered(rows, call.rank, own, buffer)
        scattered = call.scattered(rows, choice, dx, lease)

        def product(names: tuple[str, ...], target: torch.Tensor, first: int, beta: float) -> None:
            for start, stop, natural in rows.segments(names):
                for index, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
                    part = grad[natural : natural + stop - start]
                    matmul_into(target[start - first : stop - first], part, weight, beta if index == 0 else 1.0)

        def wgrad(op: Any) -> None:
            x = rows.to_natural(buffer if kept else gathered.all())
            for index, need in enumerate(needs_weight):
                if need:
                    dweights[index] = matmul(grads[index].t(), x)

        def tensor(name: str) -> torch.Tensor:
            return gathered.tensor(name) if name[0] == "g" else scattered.tensor(name)

        kernels = {"mm": lambda op: scattered.multiply(op, product), "": scattered.add, "wgrad": wgrad}
        width = features * call.dtype.itemsize
        call.run(flow, choice, rows.rows, {"g": width, "p": width}, tensor, kernels, "backward")
        scattered.finish()
    return dx, dweights
