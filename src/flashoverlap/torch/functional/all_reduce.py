"""linear_all_reduce and all_reduce_grad_linear: tensor parallelism without sequence parallelism.

    M rows on every rank, n ranks, rank r
    row layer      x [M, K_r], weight_shard [N, K_r]  ->  z [M, N], the sum over all ranks, the same bits on all
    column layer   x [M, K],   weight_shard [N_r, K]  ->  y [M, N_r]

    row layer      forward   z  = sum_q x_q W_q^T + b   pieces of the rows are scattered, then gathered, split by split
                   backward  local: dx = dz W_r, dW_r = dz^T x, db = sum of dz's rows
    column layer   forward   local: y = x W_r^T + b_r       one or several weights
                   backward  dx = sum_q dy_q W_q        the same schedule; wgrad is computed while the last gather flies

Which rank sums what is free here: rows of all dimensions are cut by torch.tensor_split, or, where rows are few, the
features of the sum. The schedule is the same, with the transpose in the place of the sum:

    pieces of rows        z_j   [M_j, N] = sum_q x_q,j W_q^T    each piece reads the whole weight
    pieces of features    z_j^T [N_j, M] = sum_q W_q,j x_q^T    each piece reads its own part of it; turned at the end
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...choice import Choice
from ...overlap import Overlap
from ...patterns import split_sizes
from ..call import Call, eager
from ..check import check_layer, check_layers, grads, shape
from ..execute import Kernel
from ..layout import Layout, flatten, layout
from ..staging import Lease
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

        def turned(target: torch.Tensor, start: int, stop: int, beta: float) -> None:
            matmul_into(target, weight[start:stop], flat.t(), beta)

        sizes = {"features": call.shard, "out": weight.shape[0]}
        reduce_rows(call, "all_reduce", flatten(z), Parts(product, turned), sizes, bias=bias)
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

        def turned(target: torch.Tensor, start: int, stop: int, beta: float) -> None:
            for index, (grad, weight) in enumerate(zip(flat, weights, strict=True)):
                matmul_into(target, weight[:, start:stop].t(), grad.t(), 1.0 if index else beta)

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
            reduce_rows(call, flow, flatten(dx), Parts(dgrad, turned), sizes, phase="backward", wgrad=wgrad)
        elif any(needs_weight):
            wgrad(None)
        dbiases = [grad.sum(0) if need else None for grad, need in zip(flat, needs_bias, strict=True)]
        return None, None, dx, *dweights, *dbiases


Part = Callable[[torch.Tensor, int, int, float], None]


class Parts(NamedTuple):
    """What writes rows of this rank's part of a sum, and what writes features of it, if anything does.

    ``rows(target, start, stop, beta)`` writes rows ``start:stop`` into ``target``, or adds them to it with ``beta=1``;
    ``features`` does so with the transpose of features ``start:stop``.
    """

    rows: Part
    features: Part | None = None


def reduce_rows(
    call: Call,
    flow: str,
    full: torch.Tensor,
    parts: Parts,
    sizes: Mapping[str, int],
    *,
    bias: torch.Tensor | None = None,
    phase: str = "",
    wgrad: Kernel | None = None,
) -> None:
    """``full[M, N] = sum over ranks of their parts``, plus bias, on every rank; ``full`` is contiguous."""
    count, columns = full.shape
    choice, rows = call.choose(flow, 1, tuple(split_sizes(count, call.world_size)), 1, sizes)
    run = _Sum(call, flow, choice, phase, wgrad)
    with call.leased() as lease:
        if choice.along == "rows":
            run(rows, full, parts.rows, bias, lease)
            return
        assert parts.features is not None
        rows = layout(1, tuple(split_sizes(columns, call.world_size)), 1, choice.splits)
        turned = lease.tensor(columns, count, full.dtype)
        if bias is not None:
            bias = bias[rows.starts[call.rank] : rows.starts[call.rank + 1], None]
        run(rows, turned, parts.features, bias, lease)
        full.copy_(turned.t())


class _Sum(NamedTuple):
    """One run of a sum, with pieces of rows or of features."""

    call: Call
    flow: str
    choice: Choice
    phase: str
    wgrad: Kernel | None

    def __call__(self, rows: Layout, full: torch.Tensor, part: Part, bias: torch.Tensor | None, lease: Lease) -> None:
        call, choice = self.call, self.choice
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

        kernels: dict[str, Kernel] = {"mm": lambda op: scattered.multiply(op, product), "": scattered.add}
        kernels |= {"wgrad": self.wgrad} if self.wgrad else {}
        widths = {"p": full.shape[1] * full.itemsize}
        call.run(self.flow, choice, rows.rows, widths, tensor, kernels, self.phase)
        if collective:
            full.copy_(total if bias is None else total + bias)
