"""Moving rows between ranks without a matmul: all_gather, split, reduce_scatter, all_reduce and sum_gradient.

M rows of x in all, K features, n ranks, rank r; M_r rows are those of torch.tensor_split

                 forward                                    backward
all_gather       x_r [M_r, K] -> [M, K]                     own rows of the gradient: it is equal on all ranks
split            x [M, K], equal on all ranks -> [M_r, K]   all-gather of the gradients
reduce_scatter   x_q [M, K] -> [M_r, K] of their sum        all-gather of the gradients
all_reduce       x_q [...] -> their sum [...]               the gradient: it is equal on all ranks
sum_gradient     x [...] -> x                               all-reduce of the gradients

Nothing is kept for backward. Sums are added in an order that does not depend on arrival.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ...choice import rows_class
from ...overlap import Overlap
from ...patterns import split_sizes
from ..call import Call, eager
from ..check import check_dim, check_overlap, check_rows, check_tensors, grads, shape
from ..layout import around, flatten
from ..pieces import Gathered
from ..staging import Lease
from ..transport import refusing, transport_of
from .all_reduce import Parts, reduce_rows
from .derivative import differentiable_once

_SMALL_BYTES = 1 << 16  # up to here one round of whole tensors is faster than the two rounds of a sum in pieces


@eager
def all_gather(x_shard: torch.Tensor, *, group: Any, dim: int = -2, overlap: Overlap = Overlap()) -> torch.Tensor:
    """Gathers the rows of all ranks, for what every rank then computes alike.

    In backward nothing moves: the gradient of the gathered rows must be equal on all ranks, and each keeps its own rows
    of it. Where ranks use the gathered rows differently, say with weight shards, pass them through
    :func:`sum_gradient` first.

    Args:
        x_shard: own rows ``[..., M_r, K]``.
        group: process group or one-dimensional DeviceMesh.
        dim: dimension of ``x_shard`` that is sharded, not the last.
        overlap: how to move the rows.

    Returns:
        ``[..., M, K]``.

    Raises:
        ValueError, TypeError: on every rank before anything moves, for arguments that do not fit together or differ
            between ranks.
        PeerError: a peer refused the call, died or stalled.
    """
    op = "all_gather"
    transport = transport_of(group, op, x_shard)
    with refusing(transport):
        row_dim = check_exchange(op, x_shard, dim, overlap)
    call = Call(op, transport, overlap, x_shard)
    outer, rows, inner = around(x_shard.shape, row_dim)
    flags = grads(x_shard)
    shared = f"outer={outer} inner={inner} features={x_shard.shape[-1]} {flags}"
    owned = call.agree_rows(shared, f"x {shape(x_shard)} dim {row_dim}, {flags}", rows)
    return _AllGather.apply(call, owned, row_dim, x_shard)  # pyright: ignore[reportReturnType]


@eager
def split(x: torch.Tensor, *, group: Any, dim: int = -2, overlap: Overlap = Overlap()) -> torch.Tensor:
    """The own rows of a tensor that all ranks hold; backward gathers the gradient of all rows.

    Args:
        x: ``[..., M, K]``, equal on all ranks.
        group: process group or one-dimensional DeviceMesh.
        dim: dimension of ``x`` to be sharded, not the last.
        overlap: how to move the rows of the gradient.

    Returns:
        A copy of the own rows ``[..., M_r, K]``: those that ``torch.tensor_split`` gives this rank.

    Raises:
        ValueError, TypeError: for arguments that do not fit together; where x requires a gradient, on every rank before
            anything moves, and also where they differ between ranks.
        PeerError: a peer refused the call, died or stalled.
    """
    op = "split"
    transport = transport_of(group, op, x)
    talks = _wants_gradient(x)  # without a gradient nothing ever moves
    with refusing(transport) if talks else nullcontext():
        row_dim = check_exchange(op, x, dim, overlap)
    call = Call(op, transport, overlap, x)
    if talks:
        call.agree("", f"{around(x.shape, row_dim)} features={x.shape[-1]}", f"x {shape(x)} dim {row_dim}")
    return _Split.apply(call, row_dim, x)  # pyright: ignore[reportReturnType]


@eager
def reduce_scatter(x: torch.Tensor, *, group: Any, dim: int = -2, overlap: Overlap = Overlap()) -> torch.Tensor:
    """Sums ``x`` over the ranks and keeps the own rows; backward gathers the gradient of all rows.

    Args:
        x: ``[..., M, K]``, this rank's term of the sum.
        group: process group or one-dimensional DeviceMesh.
        dim: dimension of ``x`` whose rows are scattered, not the last.
        overlap: how to move the rows, and the dtype in which they are added.

    Returns:
        The own rows ``[..., M_r, K]``: those that ``torch.tensor_split`` gives this rank.

    Raises:
        ValueError, TypeError: on every rank before anything moves, for arguments that do not fit together or differ
            between ranks.
        PeerError: a peer refused the call, died or stalled.
    """
    op = "reduce_scatter"
    transport = transport_of(group, op, x)
    with refusing(transport):
        row_dim = check_exchange(op, x, dim, overlap)
    call = Call(op, transport, overlap, x)
    flags = grads(x)
    shared = f"{around(x.shape, row_dim)} features={x.shape[-1]} {flags}"
    call.agree("", shared, f"x {shape(x)} dim {row_dim}, {flags}")
    return _ReduceScatter.apply(call, row_dim, x)  # pyright: ignore[reportReturnType]


@eager
def all_reduce(x: torch.Tensor, *, group: Any, overlap: Overlap = Overlap()) -> torch.Tensor:
    """Sums ``x`` over the ranks, with the same bits on all of them, for what every rank then computes alike.

    In backward nothing moves: the gradient of the sum must be equal on all ranks, and is that of each term.

    Args:
        x: this rank's term, of any number of dimensions. Up to 64 KiB, whole tensors are exchanged in one round.
        group: process group or one-dimensional DeviceMesh.
        overlap: how to move the terms, and the dtype in which they are added.

    Returns:
        The sum, of the shape of ``x``.

    Raises:
        ValueError, TypeError: on every rank before anything moves, for arguments that do not fit together or differ
            between ranks.
        PeerError: a peer refused the call, died or stalled.
    """
    op = "all_reduce"
    transport = transport_of(group, op, x)
    with refusing(transport):
        check_overlap(op, overlap)
        check_tensors(op, x)
    call = Call(op, transport, overlap, x)
    flags = grads(x)
    call.agree("", f"{shape(x)} {flags}", f"x {shape(x)}, {flags}")
    return _AllReduce.apply(call, x)  # pyright: ignore[reportReturnType]


@eager
def sum_gradient(x: torch.Tensor, *, group: Any, overlap: Overlap = Overlap()) -> torch.Tensor:
    """``x`` itself, whose gradient is summed over the ranks, with the same bits on all of them.

    For what all ranks hold alike and use on different rows or with different shards: a norm's weight before
    :func:`all_gather_linear`, replicated rows before local heads. Forward moves nothing, not even to make sure that all
    ranks are in the same call; backward does that before it sums.

    Args:
        x: of any number of dimensions, and of any dtype where it does not require a gradient. Up to 64 KiB, whole
            gradients are exchanged in one round.
        group: process group or one-dimensional DeviceMesh.
        overlap: how to move the gradients, and the dtype in which they are added.

    Returns:
        ``x``, or a view of it where a gradient will come back.

    Raises:
        TypeError: no tensor, or a DTensor; or a dtype or layout whose gradients cannot be summed.
        ValueError: in backward, on every rank before anything moves, for gradients that differ in shape or dtype.
        PeerError: a peer refused the call, died or stalled.
    """
    op = "sum_gradient"
    transport = transport_of(group, op, x)
    if isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and not _wants_gradient(x):
        check_overlap(op, overlap)
        return x
    with refusing(transport):
        check_overlap(op, overlap)
        check_tensors(op, x)
    return _SumGradient.apply(Call(op, transport, overlap, x), x)  # pyright: ignore[reportReturnType]


def check_exchange(op: str, x: torch.Tensor, dim: object, overlap: object) -> int:
    """Checks what is to be moved as it is, ``[..., M, K]``; returns the dimension of its rows from the front."""
    check_overlap(op, overlap)
    check_tensors(op, x)
    check_rows(op, x)
    return check_dim(op, x, dim)


def _wants_gradient(x: object) -> bool:
    return torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad


# --- forward and backward ---------------------------------------------------------------------------------------------


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, owned: tuple[int, ...], dim: int, x: torch.Tensor) -> torch.Tensor:
        ctx.call, ctx.dim = call, dim
        return _gather_rows(call, x, owned, dim)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, None, _own_rows(ctx.call, grad_outputs[0], ctx.dim)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, dim: int, x: torch.Tensor) -> torch.Tensor:
        ctx.call, ctx.dim, ctx.rows = call, dim, x.shape[dim]
        return _own_rows(call, x, dim)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        owned = tuple(split_sizes(ctx.rows, ctx.call.world_size))
        ctx.call.agree("backward", f"owned={owned}", f"rows {list(owned)}")
        return None, None, _gather_rows(ctx.call, grad_outputs[0], owned, ctx.dim, "backward")


class _ReduceScatter(_Split):  # the derivative is the same
    @staticmethod
    def forward(ctx: Any, call: Call, dim: int, x: torch.Tensor) -> torch.Tensor:
        ctx.call, ctx.dim, ctx.rows = call, dim, x.shape[dim]
        return _scatter_rows(call, x, dim)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, x: torch.Tensor) -> torch.Tensor:
        return _sum(call, x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, grad_outputs[0]


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, x: torch.Tensor) -> torch.Tensor:
        ctx.call, ctx.calls = call, call.transport.calls
        return x.view_as(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grad_outputs
        grad = grad if grad.layout == torch.strided else grad.to_dense()  # nn.Embedding(sparse=True)
        # forward agreed on nothing: that it stood between the same calls tells two tensors of one shape apart
        forward = f"{shape(grad)}, forward after {ctx.calls} calls"
        ctx.call.agree("backward", forward, f"gradient {forward}")
        return None, _sum(ctx.call, grad, "backward")


# --- what moves -------------------------------------------------------------------------------------------------------


def _own_rows(call: Call, x: torch.Tensor, dim: int) -> torch.Tensor:
    """A copy of this rank's rows of ``x``."""
    return x.tensor_split(call.world_size, dim)[call.rank].clone(memory_format=torch.contiguous_format)


def _gather_rows(call: Call, x: torch.Tensor, owned: tuple[int, ...], dim: int, phase: str = "") -> torch.Tensor:
    """The rows of all ranks, received straight into the result where they are contiguous there."""
    flow, features = "all_gather_matmul", x.shape[-1]
    outer, _, inner = around(x.shape, dim)
    choice, rows = call.choose(flow, outer, owned, inner, {"features": features})
    with call.leased() as lease:
        with torch.inference_mode(False):  # gloo's threads, which are not in that mode, write to these
            result = x.new_empty(*x.shape[:dim], sum(owned), *x.shape[dim + 1 :])
            flat = flatten(result)
            buffer = flat if outer == 1 else lease.tensor(rows.total, features, x.dtype)
        gathered = Gathered(rows, call.rank, flatten(x), buffer)

        def copy(op: Any) -> None:
            for part, start, stop in gathered.natural_runs(op.reads):
                if part.data_ptr() != flat[start:stop].data_ptr():
                    flat[start:stop].copy_(part)

        call.run(flow, choice, rows.rows, {"x": features * x.itemsize}, gathered.tensor, {"mm": copy}, phase)
    return result


def _scatter_rows(call: Call, x: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' ``x``."""
    flow, features = "matmul_reduce_scatter", x.shape[-1]
    outer, full, inner = around(x.shape, dim)
    owned = tuple(split_sizes(full, call.world_size))
    choice, rows = call.choose(flow, outer, owned, inner, {"features": features})
    flat = flatten(x)
    result = x.new_empty(*x.shape[:dim], owned[call.rank], *x.shape[dim + 1 :])
    with call.leased() as lease:
        scattered = call.scattered(rows, choice, flatten(result), lease)

        def copy(names: tuple[str, ...], target: torch.Tensor, first: int, beta: float) -> None:
            for start, stop, natural in rows.segments(names):
                _put(target[start - first : stop - first], flat[natural : natural + stop - start], beta)

        kernels = {"mm": lambda op: scattered.multiply(op, copy), "": scattered.add}
        call.run(flow, choice, rows.rows, {"p": features * x.itemsize}, scattered.tensor, kernels)
        scattered.finish()
    return result


def _sum(call: Call, x: torch.Tensor, phase: str = "") -> torch.Tensor:
    """The sum of all ranks' ``x``, with the same bits on all."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.nbytes <= _SMALL_BYTES:
        with call.leased() as lease:
            first, *others = whole_tensors(call, x, lease, phase)
            total = first.to(call.accumulate, copy=True)
            for other in others:
                total += other
            return result.copy_(total)
    flat = flatten(x) if x.dim() > 1 else x.contiguous().view(-1, 1)

    def part(target: torch.Tensor, start: int, stop: int, beta: float) -> None:
        _put(target, flat[start:stop], beta)

    reduce_rows(call, "all_reduce", result.view(flat.shape), Parts(part), {"features": flat.shape[1]}, phase=phase)
    return result


def whole_tensors(call: Call, x: torch.Tensor, lease: Lease, phase: str = "") -> list[torch.Tensor]:
    """All ranks' ``x`` by rank, exchanged in one round; they lie in the lease."""
    flow, each = "all_gather_matmul", (1,) * call.world_size
    choice, rows = call.choose(flow, 1, each, 1, {"features": rows_class(x.numel(), 1)})
    buffer = lease.tensor(rows.total, x.numel(), x.dtype)
    tensors = [row.view(x.shape) for row in buffer]
    tensors[call.rank].copy_(x)
    gathered = Gathered(rows, call.rank, buffer[call.rank : call.rank + 1], buffer)
    call.run(flow, choice, each, {"x": x.nbytes}, gathered.tensor, {"mm": lambda op: None}, phase)
    return tensors


def _put(target: torch.Tensor, rows: torch.Tensor, beta: float) -> None:
    """``target = rows + beta * target``."""
    if beta:
        target += rows
    else:
        target.copy_(rows)
