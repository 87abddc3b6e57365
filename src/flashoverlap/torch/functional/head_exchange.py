"""rows_to_heads and heads_to_rows: the exchanges around an attention of own heads (Ulysses), by themselves.

M rows in all, N features, n ranks, rank r with rows M_r (those of torch.tensor_split) and the features N_r of its heads
rows_to_heads   x_shard [M_r, N]  ->  [M, N_r]
heads_to_rows   h [M, N_r]        ->  [M_r, N]

Each is the derivative of the other; where ranks have features in common, their gradients are summed. They are for
features that have been made elsewhere, as by tensor parallelism; linear_all_to_all and all_to_all_linear hide them
behind the linear that makes or reads them, and attention_all_to_all behind the attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...overlap import Overlap
from ...patterns import split_sizes
from ...schedule import Compute
from ..blocks import Swapped, new_rows
from ..call import Call, eager
from ..check import grads, shape
from ..execute import Kernel
from ..layout import around, flatten
from ..transport import refusing, transport_of
from .derivative import differentiable_once
from .exchange import check_exchange
from .shares import Shares, at, check_partition, check_shares, partition


@eager
def rows_to_heads(
    x_shard: torch.Tensor, shares: Sequence[range], *, group: Any, overlap: Overlap = Overlap()
) -> torch.Tensor:
    """Gives every rank all rows of its features.

    Args:
        x_shard: own rows ``[..., M_r, N]``.
        shares: by rank, the range of features that it is given; they may be unequal, empty or overlap.
        group: process group or one-dimensional DeviceMesh.
        overlap: how to move them.

    Returns:
        ``[..., M, N_r]``.

    Raises:
        ValueError, TypeError: on every rank before anything moves, for arguments that do not fit together or differ
            between ranks.
        PeerError: a peer refused the call, died or stalled.
    """
    op = "rows_to_heads"
    transport = transport_of(group, op, x_shard)
    with refusing(transport):
        check_exchange(op, x_shard, -2, overlap)
        found = check_shares(op, shares, x_shard.shape[-1], transport.world_size, all_once=False)
    call = Call(op, transport, overlap, x_shard)
    outer, rows, inner = around(x_shard.shape, -2)
    flags = grads(x_shard)
    shared = f"outer={outer} inner={inner} shares={found} {flags}"
    owned = call.agree_rows(shared, f"x {shape(x_shard)}, {flags}, shares {found}", rows)
    return _RowsToHeads.apply(call, owned, found, x_shard)  # pyright: ignore[reportReturnType]


@eager
def heads_to_rows(
    h: torch.Tensor, shares: Sequence[range], *, group: Any, overlap: Overlap = Overlap()
) -> torch.Tensor:
    """Gives every rank all features of its rows.

    Args:
        h: all rows of own features ``[..., M, N_r]``.
        shares: by rank, the range of features that it has: each feature once.
        group: process group or one-dimensional DeviceMesh.
        overlap: how to move them.

    Returns:
        The own rows ``[..., M_r, N]``: those that ``torch.tensor_split`` gives this rank.

    Raises:
        ValueError, TypeError: on every rank before anything moves, for arguments that do not fit together or differ
            between ranks.
        PeerError: a peer refused the call, died or stalled.
    """
    op = "heads_to_rows"
    transport = transport_of(group, op, h)
    with refusing(transport):
        check_exchange(op, h, -2, overlap)
        found = check_partition(op, shares, h.shape[-1], transport)
    call = Call(op, transport, overlap, h)
    flags = grads(h)
    shared = f"{around(h.shape, -2)} shares={found} {flags}"
    call.agree("", shared, f"h {shape(h)}, {flags}, shares {found}")
    owned = tuple(split_sizes(h.shape[-2], call.world_size))
    return _HeadsToRows.apply(call, owned, found, h)  # pyright: ignore[reportReturnType]


class _RowsToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, owned: tuple[int, ...], shares: Shares, x: torch.Tensor) -> torch.Tensor:
        ctx.call, ctx.owned, ctx.shares, ctx.features = call, owned, shares, x.shape[-1]
        return _to_heads(call, x, owned, shares)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.call.agree("backward", f"owned={ctx.owned}", f"rows {list(ctx.owned)}")
        return None, None, None, _to_rows(ctx.call, grad_outputs[0], ctx.owned, ctx.shares, ctx.features, "backward")


class _HeadsToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, owned: tuple[int, ...], shares: Shares, h: torch.Tensor) -> torch.Tensor:
        ctx.call, ctx.owned, ctx.shares = call, owned, shares
        return _to_rows(call, h, owned, shares, sum(map(len, shares)))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.call.agree("backward", f"owned={ctx.owned}", f"rows {list(ctx.owned)}")
        return None, None, None, _to_heads(ctx.call, grad_outputs[0], ctx.owned, ctx.shares, "backward")


def taking(swapped: Swapped, own: torch.Tensor, shares: Shares) -> Kernel:
    """The kernel that makes blocks of own rows ``[M_r, N]``, of all features."""

    def take(op: Compute) -> None:
        for place in swapped.places(op.writes):
            swapped.at(place).copy_(own[swapped.own(place), at(shares[place.holder])])

    return take


def putting(swapped: Swapped, own: torch.Tensor, shares: Shares, *, once: bool = True) -> Kernel:
    """The kernel that puts blocks into own rows ``[M_r, N]``, or adds those of features that several ranks have."""

    def put(op: Compute) -> None:
        for place in swapped.places(op.reads):
            target = own[swapped.own(place), at(shares[place.holder])]
            if once:
                target.copy_(swapped.at(place))
            else:
                target += swapped.at(place)

    return put


def _to_heads(call: Call, x: torch.Tensor, owned: tuple[int, ...], shares: Shares, phase: str = "") -> torch.Tensor:
    """All rows of own features, of own rows ``[..., M_r, N]``."""
    flow, own = "all_to_all", flatten(x)
    outer, _, inner = around(x.shape, -2)
    choice, rows = call.choose(flow, outer, owned, inner)
    whole = new_rows(x, rows.total, len(shares[call.rank]))
    with call.leased() as lease:
        swapped = Swapped(rows, call.rank, [shares], [whole], lease, to_features=True)
        kernels = {"mm": taking(swapped, own, shares)}
        call.run_schedule(swapped.schedule(flow, choice), choice, swapped.tensor, kernels, phase)
    return rows.to_natural(whole).view(*x.shape[:-2], sum(owned), whole.shape[1])


def _to_rows(
    call: Call, h: torch.Tensor, owned: tuple[int, ...], shares: Shares, features: int, phase: str = ""
) -> torch.Tensor:
    """All features of own rows, of all rows ``[..., M, N_r]``; features that several ranks have are summed."""
    flow = "all_to_all_matmul"
    outer, _, inner = around(h.shape, -2)
    choice, rows = call.choose(flow, outer, owned, inner)
    once = partition(shares, features)
    result = h.new_empty(rows.rows[call.rank], features)
    with call.leased() as lease:
        total = result if once else torch.zeros_like(result, dtype=call.accumulate)
        swapped = Swapped(rows, call.rank, [shares], [rows.to_pieces(flatten(h))], lease, to_features=False)
        kernels = {"mm": putting(swapped, total, shares, once=once)}
        call.run_schedule(swapped.schedule(flow, choice), choice, swapped.tensor, kernels, phase)
        if not once:
            result.copy_(total)
    return result.view(*h.shape[:-2], owned[call.rank], features)
