"""linear_all_reduce and all_reduce_grad_linear: tensor parallelism without sequence parallelism.

    M rows on every rank, n ranks, rank r
    row layer      x [M, K_r], weight_shard [N, K_r]  ->  z [M, N], the sum over all ranks, the same bits on all
    column layer   x [M, K],   weight_shard [N_r, K]  ->  y [M, N_r]

    row layer      forward   z  = sum_q x_q W_q^T + b   pieces of the rows are scattered, then gathered, split by split
                   backward  local: dx = dz W_r, dW_r = dz^T x, db = sum of dz's rows
    column layer   forward   local: y = x W_r^T + b_r       one or several weights
                   backward  dx = sum_q dy_q W_q        the same schedule; wgrad is computed while the last gather flies

Which rank sums which rows is free here: rows of all dimensions are cut by torch.tensor_split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from ...overlap import Overlap
from ...patterns import split_sizes
from ..call import Call, eager
from ..check import check_layer, check_layers, grads, shape
from ..layout import flatten
from ..transport import refusing, transport_of
from .derivative import differentiable_once
from .kernels import matmul, matmul_into


@eager
def linear_all_reduce(
    x: torch.Tensor,
    weight_shard: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Any,
    dim: int = -2,
    overlap: Overlap = Overlap(),
) -> torch.Tensor:
    """Sums ``x @ weight_shard.T`` over the ranks, ``[..., M, N]`` on each, overlapped split by split.

    Args:
        x: ``[..., M, K_r]``, all rows of the own features.
        weight_shard: ``[N, K_r]``.
        bias: ``[N]``, the full bias, equal on all ranks; added once.
        group: process group or one-dimensional DeviceMesh.
        dim: accepted for symmetry with linear_reduce_scatter; rows of all dimensions are cut alike.
        overlap: how to overlap.

    Returns:
        ``[..., M, N]``, bitwise equal on all ranks.

    Raises:
        ValueError, TypeError: on every rank before anything moves, for arguments that do not fit together or differ
            between ranks.
        PeerError: a peer refused the call, died or stalled.
    """
    op = "linear_all_reduce"
    transport = transport_of(group, op, x)
    with refusing(transport):
        cast, _ = check_layer(op, x, weight_shard, bias, dim, overlap)
    call = Call(op, transport, overlap, cast[0])
    flags = grads(x, weight_shard, bias)
    shared = f"x={list(cast[0].shape[:-1])} out={cast[1].shape[0]} bias={bias is not None} {flags}"
    shown = f"x {shape(cast[0])}, weight {shape(cast[1])}, bias {shape(bias)}, {flags}"
    call.agree("", shared, shown, shard=cast[1].shape[1])
    return _LinearAllReduce.apply(call, *cast)  # pyright: ignore[reportReturnType]


@eager
def all_reduce_grad_linear(
    x: torch.Tensor,
    weight_shard: torch.Tensor | Sequence[torch.Tensor],
    bias_shard: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    *,
    group: Any,
    overlap: Overlap = Overlap(),
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """A column-parallel linear on replicated rows, whose input gradient is summed over the ranks, overlapped.

    Args:
        x: ``[..., M, K]``, equal on all ranks.
        weight_shard: ``[N_r, K]``, or a sequence of such (q, k, v; gate, up): one all-reduce serves them all.
        bias_shard: ``[N_r]``, or a sequence as long as the weights, with None where there is none.
        group: process group or one-dimensional DeviceMesh.
        overlap: how to overlap.

    Returns:
        ``[..., M, N_r]``, or a tuple of these for a sequence of weights.

    Raises:
        ValueError, TypeError: on every rank before anything moves, for arguments that do not fit together or, where a
            gradient will be wanted, differ between ranks.
        PeerError: a peer refused the call, died or stalled.
    """
    op = "all_reduce_grad_linear"
    transport = transport_of(group, op, x)
    talks = torch.is_grad_enabled()  # without gradients nothing ever moves
    with refusing(transport) if talks else nullcontext():
        x, weights, biases, _ = check_layers(op, x, weight_shard, bias_shard, -2, overlap)
    call = Call(op, transport, overlap, x)
    if talks:
        flags = grads(x, *weights, *biases)
        shown = f"x {shape(x)}, weight {', '.join(map(shape, weights))}, {flags}"
        call.agree("", f"x={list(x.shape)} weights={len(weights)} {flags}", shown, shard=sum(map(len, weights)))
    outputs = _AllReduceGradLinear.apply(call, len(weights), x, *weights, *biases)
    return tuple(outputs) if isinstance(weight_shard, Sequence) else outputs[0]


class _LinearAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> torch.Tensor:
        x, weight, bias = tensors
        ctx.save_for_backward(x, weight)
        z = x.new_empty(*x.shape[:-1], weight.shape[0])
        flat, transposed = flatten(x), weight.t()

        def product(target: torch.Tensor, start: int, stop: int, beta: float) -> None:
            matmul_into(target, flat[start:stop], transposed, beta)

        sizes = {"features": call.shard, "out": weight.shape[0]}
        reduce_rows(call, "all_reduce", flatten(z), product, sizes, bias=bias)
        return z

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[1:]
        grad = flatten(grad_outputs[0])
        dx = matmul(grad, weight).view(x.shape) if needs_x else None
        dweight = matmul(grad.t(), flatten(x)) if needs_weight else None
        return None, dx, dweight, grad.sum(0) if needs_bias else None


class _AllReduceGradLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, count: int, *tensors: Any) -> tuple[torch.Tensor, ...]:
        x, weights, biases = tensors[0], tensors[1 : count + 1], tensors[count + 1 :]
        ctx.call, ctx.count = call, count
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: Call = ctx.call
        x, *weights = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad[2:]
        needs_weight, needs_bias = needs[: ctx.count], needs[ctx.count :]
        flat = [flatten(grad) for grad in grad_outputs]
        dx = None
        dweights: list[Any] = [None] * ctx.count

        def dgrad(target: torch.Tensor, start: int, stop: int, beta: float) -> None:
            for index, (grad, weight) in enumerate(zip(flat, weights, strict=True)):
                matmul_into(target, grad[start:stop], weight, 1.0 if index else beta)

        def wgrad(_: Any) -> None:
            rows = flatten(x)
            for index, need in enumerate(needs_weight):
                if need:
                    dweights[index] = matmul(flat[index].t(), rows)

        if needs_x:
            flow = "all_reduce_backward" + ("" if any(needs_weight) else "-w")
            call.agree("backward", f"{flow} x={list(x.shape)}", f"{flow}, x {shape(x)}")
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            sizes = {"features": x.shape[-1], "out": call.shard}
            reduce_rows(call, flow, flatten(dx), dgrad, sizes, phase="backward", wgrad=wgrad)
        elif any(needs_weight):
            wgrad(None)
        dbiases = [grad.sum(0) if need else None for grad, need in zip(flat, needs_bias, strict=True)]
        return None, None, dx, *dweights, *dbiases


def reduce_rows(
    call: Call,
    flow: str,
    full: torch.Tensor,
    part: Callable[[torch.Tensor, int, int, float], None],
    sizes: Mapping[str, int],
    *,
    bias: torch.Tensor | None = None,
    phase: str = "",
    wgrad: Callable[[Any], None] | None = None,
) -> None:
    """``full[M, N] = sum over ranks of their parts``, plus bias, on every rank.

    ``part(target, start, stop, beta)`` writes rows ``start:stop`` of this rank's part into ``target``, or, with
    ``beta=1``, adds them to it. ``full`` is contiguous.
    """
    owned = tuple(split_sizes(full.shape[0], call.world_size))
    choice, rows = call.choose(flow, 1, owned, 1, sizes)
    with call.leased() as lease:
        travels = call.travels(choice)
        collective = choice.pattern == "collective"
        # the backend sums whole rows itself: then the sum of all rows is staged as if it were this rank's piece
        total = full if not collective or travels == full.dtype else lease.tensor(rows.total, full.shape[1], travels)
        out = full[rows.starts[call.rank] : rows.starts[call.rank + 1]]
        scattered = call.scattered(rows, choice, out, lease, bias)

        def product(names: tuple[str, ...], target: torch.Tensor, first: int, beta: float) -> None:
            for start, stop, _ in rows.segments(names):
                part(target[start - first : stop - first], start, stop, beta)

        def tensor(name: str) -> torch.Tensor:
            if name[0] != "z":
                return scattered.tensor(name)
            start, stop = rows.range(name)
            return total[start:stop]

        kernels = {"mm": lambda op: scattered.multiply(op, product), "": scattered.add}
        kernels |= {"wgrad": wgrad} if wgrad else {}
        call.run(flow, choice, rows.rows, {"p": full.shape[1] * full.itemsize}, tensor, kernels, phase)
        if collective:
            full.copy_(total if bias is None else total + bias)
