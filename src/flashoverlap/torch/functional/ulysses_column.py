"""linear_all_to_all: own rows in, own features of all rows out; the way into attention of the own heads (Ulysses).

M rows in all, K features, n ranks, rank r; N_r are the features of rank r
x_shard   [M_r, K]     rows of rank r (those of torch.tensor_split)
weight    [N, K]       whole on every rank; W_r are its rows of rank r
y         [M, N_r]

forward   block r_t = x_r W_t^T             for rank t: the blocks of others first, each sent while the next is computed
dgrad     dx_r = sum_t dy_t,r W_t           the gradients of own rows come from all ranks; the own block first
wgrad     dW_t = dy_t,r^T x_r               of the own rows, beside dgrad: to be summed over the ranks
dbias     db_t = sum of dy_t,r's rows       likewise

memory    x_shard is kept for backward (M / n rows)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...choice import Choice
from ...overlap import Overlap
from ..blocks import Summed, Swapped, new_rows
from ..call import Call, eager
from ..check import check_layers, grads, shape
from ..layout import Layout, around, flatten
from ..staging import Lease
from ..transport import refusing, transport_of
from .derivative import differentiable_once
from .kernels import linear_into, matmul_into, sum_into
from .shares import Shares, at, check_shares, partition

_OP = "linear_all_to_all"


@eager
def linear_all_to_all(
    x_shard: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    *,
    group: Any,
    shares: Sequence[range] | Sequence[Sequence[range] | None] | None = None,
    dim: int = -2,
    overlap: Overlap = Overlap(),
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Applies a linear to the own rows and exchanges its outputs: all rows of the own features.

    The gradients of weights and biases are those of the own rows. As under data parallelism, they are to be summed over
    the ranks (:func:`sum_gradient` does that).

    Args:
        x_shard: own rows ``[..., M_r, K]``; ``dim`` is the dimension of the rows.
        weight: ``[N, K]``, equal on all ranks, or a sequence of such (q, k, v): they share one schedule.
        bias: ``[N]``, or a sequence as long as the weights, with None where there is none.
        group: process group or one-dimensional DeviceMesh.
        shares: by rank, the range of output features that it is given; for a sequence of weights, such a list (or None)
            for each. Shares may be unequal, empty or overlap, as for key/value heads that ranks have in common. None is
            ``torch.tensor_split``.
        dim: dimension of ``x_shard`` that is sharded, not the last: -2 for ``[B, S, K]``, 0 for ``[S, B, K]``.
        overlap: how to overlap.

    Returns:
        ``[..., M, N_r]``, or a tuple of these for a sequence of weights.

    Raises:
        ValueError, TypeError: on every rank before anything moves, for arguments that do not fit together or differ
            between ranks.
        PeerError: a peer refused the call, died or stalled.
    """
    transport = transport_of(group, _OP, x_shard)
    with refusing(transport):
        x, weights, biases, row_dim = check_layers(_OP, x_shard, weight, bias, dim, overlap)
        several = isinstance(weight, Sequence)
        each: Any = shares if several and shares is not None else [shares] * len(weights)
        if len(each) != len(weights) or len(weights) > 26:
            raise ValueError(
                f"{_OP}: {len(weights)} weights and {len(each)} lists of shares; at most 26, one list each"
            )
        found = [
            check_shares(_OP, share, len(w), transport.world_size, all_once=False)
            for share, w in zip(each, weights, strict=True)
        ]
    call = Call(_OP, transport, overlap, x)
    outer, rows, inner = around(x.shape, row_dim)
    flags = grads(x, *weights, *biases)
    sizes = [len(w) for w in weights]
    shared = f"outer={outer} inner={inner} features={x.shape[-1]} out={sizes} shares={found} {flags}"
    shared += f" biases={[b is not None for b in biases]}"
    shown = f"x {shape(x)} dim {row_dim}, weight {', '.join(map(shape, weights))}, {flags}, shares {found}"
    owned = call.agree_rows(shared, shown, rows)
    outputs = _LinearAllToAll.apply(call, owned, row_dim, found, x, *weights, *biases)
    return tuple(outputs) if several else outputs[0]


class _LinearAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, owned: tuple[int, ...], dim: int, shares: list[Shares], *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        count = len(shares)
        x, weights, biases = tensors[0], tensors[1 : count + 1], tensors[count + 1 :]
        outer, _, inner = around(x.shape, dim)
        flow, own = "all_to_all", flatten(x)
        sizes = {"features": x.shape[-1], "out": [len(weight) for weight in weights]}
        choice, rows = call.choose(flow, outer, owned, inner, sizes)
        wholes = [new_rows(x, rows.total, len(share[call.rank])) for share in shares]
        with call.leased() as lease:
            swapped = Swapped(rows, call.rank, shares, wholes, lease, to_features=True)

            def mm(op: Any) -> None:
                for place in swapped.places(op.writes):
                    weight, bias = weights[place.matrix], biases[place.matrix]
                    features = at(shares[place.matrix][place.holder])
                    bias = None if bias is None else bias[features]
                    linear_into(swapped.at(place), own[swapped.own(place)], weight[features], bias)

            call.run_schedule(swapped.schedule(flow, choice), choice, swapped.tensor, {"mm": mm})
        full = (*x.shape[:dim], sum(owned), *x.shape[dim + 1 : -1])
        ctx.call, ctx.owned, ctx.dim, ctx.shares = call, owned, dim, shares
        ctx.save_for_backward(x, *weights)
        return tuple(rows.to_natural(whole).view(*full, whole.shape[1]) for whole in wholes)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: Call = ctx.call
        x, *weights = ctx.saved_tensors
        count = len(weights)
        needs_x, *needs = ctx.needs_input_grad[4:]
        needs_weight, needs_bias = needs[:count], needs[count:]
        flow = "all_to_all_backward" + ("" if any(needs) else "-w") + ("" if needs_x else "-z")
        call.agree("backward", f"{flow} owned={ctx.owned}", f"{flow}, rows {list(ctx.owned)}")
        outer, _, inner = around(x.shape, ctx.dim)
        sizes = {"features": x.shape[-1], "out": [len(weight) for weight in weights]}
        choice, rows = call.choose(flow, outer, ctx.owned, inner, sizes)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
        sides = [_Weight.of(*each) for each in zip(weights, ctx.shares, needs_weight, needs_bias, strict=True)]
        moving = [i for i, side in enumerate(sides) if needs_x or side.wants]
        wholes = [rows.to_pieces(flatten(grad_outputs[i])) for i in moving]
        _run_backward(call, flow, choice, rows, wholes, [sides[i] for i in moving], flatten(x), dx)
        dbiases = [None if side.dbias is None else side.dbias[:, 0] for side in sides]
        return None, None, None, None, dx, *(side.dweight for side in sides), *dbiases


class _Weight(NamedTuple):
    """A weight ``[N, K]``, its shares, and the gradients that are wanted: ``[N, K]`` and ``[N, 1]``."""

    weight: torch.Tensor
    shares: Shares
    dweight: torch.Tensor | None
    dbias: torch.Tensor | None

    @staticmethod
    def of(weight: torch.Tensor, shares: Shares, needs_weight: bool, needs_bias: bool) -> _Weight:
        dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
        return _Weight(weight, shares, dweight, weight.new_empty(len(weight), 1) if needs_bias else None)

    @property
    def wants(self) -> bool:
        return self.dweight is not None or self.dbias is not None

    def summed(self, out: torch.Tensor | None, call: Call, choice: Choice, lease: Lease) -> Summed | None:
        """The sum of a gradient's terms: rows that several ranks share have several, and splits have one each."""
        if out is None:
            return None
        once = partition(self.shares, len(out))
        one_term = once and choice.splits == 1
        return Summed(out, call.dtype if one_term else call.accumulate, lease, zeroed=not once)


def _run_backward(
    call: Call,
    flow: str,
    choice: Choice,
    rows: Layout,
    wholes: Sequence[torch.Tensor],
    sides: Sequence[_Weight],
    x: torch.Tensor,
    dx: torch.Tensor | None,
) -> None:
    """Exchanges the gradients ``wholes`` ``[M, N_r]``, in piece order; fills ``dx`` ``[.., M_r, K]`` and the sides'."""
    with call.leased() as lease:
        shares = [side.shares for side in sides]
        swapped = Swapped(rows, call.rank, shares, wholes, lease, to_features=False)
        total = None if dx is None else Summed(dx.view(x.shape), call.accumulate, lease)
        dweights = [side.summed(side.dweight, call, choice, lease) for side in sides]
        dbiases = [side.summed(side.dbias, call, choice, lease) for side in sides]

        def mm(op: Any) -> None:
            assert total is not None
            place = swapped.place(op.reads[0])
            grad, part = swapped.at(place), sides[place.matrix].weight[at(shares[place.matrix][place.holder])]
            own = swapped.own(place)
            total.add(own.start, own.stop, lambda target, beta: matmul_into(target, grad, part, beta))

        def wgrad(op: Any) -> None:
            place = swapped.place(op.reads[0])
            grad, part, share = swapped.at(place).t(), x[swapped.own(place)], shares[place.matrix][place.holder]
            dweight, dbias = dweights[place.matrix], dbiases[place.matrix]
            if dweight is not None:
                dweight.add(share.start, share.stop, lambda target, beta: matmul_into(target, grad, part, beta))
            if dbias is not None:
                dbias.add(share.start, share.stop, lambda target, beta: sum_into(target, grad, beta))

        schedule = swapped.schedule(flow, choice)
        call.run_schedule(schedule, choice, swapped.tensor, {"mm": mm, "wgrad": wgrad}, "backward")
        for each in (total, *dweights, *dbiases):
            if each is not None:
                each.finish()
