"""all_to_all_linear: own features of all rows in, own rows out; the way out of attention of the own heads (Ulysses).

M rows in all, n ranks, rank r with N_r input features, K output features
h         [M, N_r]
weight    [K, N]       whole on every rank; W_r are its columns of rank r
z_shard   [M_r, K]     rows of rank r (those of torch.tensor_split)

forward   z_r  = sum_s h_r,s W_s^T + b      the own rows come from all ranks; the own block first
dgrad     block r_s = dz_r W_s              for rank s: the blocks of others first, each sent while the next is computed
wgrad     dW_s = dz_r^T h_r,s               of the own rows, of what came in forward: to be summed over the ranks
dbias     db   = sum of dz_r's rows         likewise

memory    the own rows of all features are kept for backward (M / n rows), where the weight wants a gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...overlap import Overlap
from ...patterns import split_sizes
from ...schedule import Compute
from ..blocks import Summed, Swapped, new_rows
from ..call import Call, eager
from ..check import autocast, check_dim, check_overlap, check_rows, check_tensors, check_weight, grads, shape
from ..execute import Kernel
from ..layout import around, flatten
from ..transport import refusing, transport_of
from .derivative import differentiable_once
from .kernels import matmul_into
from .shares import Shares, at, check_shares

_OP = "all_to_all_linear"


@eager
def all_to_all_linear(
    h: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Any,
    shares: Sequence[range] | None = None,
    dim: int = -2,
    overlap: Overlap = Overlap(),
) -> torch.Tensor:
    """Exchanges all rows of the own features for own rows of all features, and applies a linear as they come.

    The gradients of weight and bias are those of the own rows. As under data parallelism, they are to be summed over
    the ranks (:func:`sum_gradient` does that).

    Args:
        h: ``[..., M, N_r]``, all rows; ``dim`` is the dimension of the rows.
        weight: ``[K, N]``, equal on all ranks.
        bias: ``[K]``, equal on all ranks.
        group: process group or one-dimensional DeviceMesh.
        shares: by rank, the range of input features that it has: each feature once. None is ``torch.tensor_split``.
        dim: dimension of ``h`` whose rows are exchanged, not the last.
        overlap: how to overlap.

    Returns:
        The own rows ``[..., M_r, K]``: those that ``torch.tensor_split`` gives this rank.

    Raises:
        ValueError, TypeError: on every rank before anything moves, for arguments that do not fit together or differ
            between ranks.
        PeerError: a peer refused the call, died or stalled.
    """
    transport = transport_of(group, _OP, h)
    with refusing(transport):
        check_overlap(_OP, overlap)
        cast: list[Any] = autocast(h, weight, bias)
        check_tensors(_OP, cast[0], cast[1:2], cast[2:], called="h")
        check_rows(_OP, cast[0])
        found = check_projection(_OP, cast[1], cast[2], shares, transport, cast[0].shape[-1])
        row_dim = check_dim(_OP, cast[0], dim)
    call = Call(_OP, transport, overlap, cast[0])
    outer, rows, inner = around(cast[0].shape, row_dim)
    flags = grads(h, weight, bias)
    shared = f"outer={outer} rows={rows} inner={inner} weight={shape(weight)} {bias is not None} {found} {flags}"
    shown = f"h {shape(cast[0])} dim {row_dim}, weight {shape(weight)}, bias {shape(bias)}, {flags}, shares {found}"
    call.agree("", shared, shown, shard=cast[0].shape[-1])
    return _AllToAllLinear.apply(call, row_dim, found, *cast)  # pyright: ignore[reportReturnType]


def check_projection(op: str, weight: Any, bias: Any, shares: Any, transport: Any, features: int) -> Shares:
    """The shares of the input features of ``weight``, of which this rank has ``features``.

    Raises:
        ValueError, TypeError: they do not fit together.
    """
    check_weight(op, weight, bias)
    found = check_shares(op, shares, weight.shape[1], transport.world_size, all_once=True)
    if len(found[transport.rank]) != features:
        raise ValueError(
            f"{op}: this rank has {features} features, and its share of weight {tuple(weight.shape)} is "
            f"{found[transport.rank]}"
        )
    return found


class Projection:
    """The linear on own rows whose features come from all ranks, and its gradients.

    Args:
        swapped: the features; in backward, of their gradient.
        weight: ``[K, N]``.
        shares: by rank, the input features.
    """

    def __init__(self, swapped: Swapped, weight: torch.Tensor, shares: Shares) -> None:
        self.swapped, self.weight, self.shares = swapped, weight, shares

    def add_to(self, total: Summed) -> Kernel:
        """The kernel that adds the product of a block to the own rows."""

        def mm(op: Compute) -> None:
            place = self.swapped.place(op.reads[0])
            h, own, part = (
                self.swapped.at(place),
                self.swapped.own(place),
                self.weight[:, at(self.shares[place.holder])].t(),
            )
            total.add(own.start, own.stop, lambda target, beta: matmul_into(target, h, part, beta))

        return mm

    def dgrad(self, dz: torch.Tensor) -> Kernel:
        """The kernel that makes blocks of the features' gradient, of own rows ``dz [M_r, K]``."""

        def mm(op: Compute) -> None:
            for place in self.swapped.places(op.writes):
                part = self.weight[:, at(self.shares[place.holder])]
                matmul_into(self.swapped.at(place), dz[self.swapped.own(place)], part, 0.0)

        return mm


def wgrad(dz: torch.Tensor, strips: Sequence[torch.Tensor], weight: torch.Tensor, shares: Shares) -> torch.Tensor:
    """``dW [K, N]`` of own rows ``dz [M_r, K]`` and the features that came from each rank."""
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for strip, share in zip(strips, shares, strict=True):
        matmul_into(dweight[:, at(share)], dz.t(), strip, 0.0)
    return dweight


def new_strips(like: torch.Tensor, rows: int, shares: Shares) -> list[torch.Tensor]:
    """Where the own rows that come from each rank are kept: ``[M_r, N_s]`` for every rank s."""
    return [new_rows(like, rows, len(share)) for share in shares]


class _AllToAllLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, dim: int, shares: Shares, *tensors: Any) -> torch.Tensor:
        h, weight, bias = tensors
        outer, full, inner = around(h.shape, dim)
        owned = tuple(split_sizes(full, call.world_size))
        flow = "all_to_all_matmul"
        sizes = {"features": call.shard, "out": len(weight)}
        choice, rows = call.choose(flow, outer, owned, inner, sizes)
        z = h.new_empty(*h.shape[:dim], owned[call.rank], *h.shape[dim + 1 : -1], len(weight))
        keeps = call.differentiable and ctx.needs_input_grad[4]
        strips = new_strips(h, rows.rows[call.rank], shares) if keeps else []
        with call.leased() as lease:
            whole = rows.to_pieces(flatten(h))
            swapped = Swapped(rows, call.rank, [shares], [whole], lease, to_features=False, strips=[strips])
            total = Summed(flatten(z), call.accumulate, lease, bias=bias)
            kernels = {"mm": Projection(swapped, weight, shares).add_to(total)}
            call.run_schedule(swapped.schedule(flow, choice), choice, swapped.tensor, kernels)
            total.finish()
            if keeps:
                strips[call.rank].copy_(swapped.strip(0, call.rank))
        ctx.call, ctx.dim, ctx.shares, ctx.owned = call, dim, shares, owned
        ctx.shape = h.shape
        ctx.save_for_backward(weight, *strips)
        return z

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: Call = ctx.call
        weight, *strips = ctx.saved_tensors
        needs_h, needs_weight, needs_bias = ctx.needs_input_grad[3:]
        outer, _, inner = around(ctx.shape, ctx.dim)
        dz = flatten(grad_outputs[0])
        dh = dweight = None

        def local(op: Any = None) -> None:
            nonlocal dweight
            dweight = wgrad(dz, strips, weight, ctx.shares)

        if needs_h:
            flow = "all_to_all_matmul_backward" + ("" if needs_weight else "-w")
            call.agree("backward", f"{flow} owned={ctx.owned}", f"{flow}, rows {list(ctx.owned)}")
            sizes = {"features": call.shard, "out": len(weight)}
            choice, rows = call.choose(flow, outer, ctx.owned, inner, sizes)
            whole = dz.new_empty(rows.total, ctx.shape[-1])
            with call.leased() as lease:
                swapped = Swapped(rows, call.rank, [ctx.shares], [whole], lease, to_features=True)
                kernels = {"mm": Projection(swapped, weight, ctx.shares).dgrad(dz), "wgrad": local}
                call.run_schedule(swapped.schedule(flow, choice), choice, swapped.tensor, kernels, "backward")
            dh = rows.to_natural(whole).view(ctx.shape)
        elif needs_weight:
            local()
        return None, None, None, dh, dweight, dz.sum(0) if needs_bias else None
