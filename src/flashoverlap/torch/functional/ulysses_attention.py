"""attention_all_to_all_linear: attention of the own heads, and the way out of it (Ulysses), in one schedule.

attention_all_to_all is the same without a projection: what comes is put side by side, and W is the identity.

B sequences of S tokens, n ranks, rank r with H query heads and G key/value heads of D features, K output features
q         [B, H, S, D]
k, v      [B, G, T, D]
weight    [K, N]          whole on every rank; W_r are its columns of rank r, H * D of them
z_shard   [B, S_r, K]     rows of rank r (those of torch.tensor_split)

forward   block r_t = attention_r(queries of t)  for rank t: those of others first, each sent while the next is made
          z_r = sum_s block s_r W_s^T + b        own queries first, then what comes
dgrad     block r_s = dz_r W_s                   for rank s, those of others first; what comes goes through attention
                                                 by its queries: dq, and terms of dk and dv
wgrad     dW_s = dz_r^T block s_r                of the own rows, of what came in forward: to be summed over the ranks
dbias     db = sum of dz_r's rows                likewise

memory    q, k, v, all rows of the own heads' output and the own rows of all heads' output, and what the kernel saves
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...overlap import Overlap
from ...patterns import split_sizes
from ...schedule import Compute
from ..blocks import Place, Summed, Swapped
from ..call import Call, eager
from ..check import autocast, check_overlap, check_tensors, grads, shape
from ..execute import Kernel as Runs
from ..layout import Layout
from ..transport import refusing, transport_of
from .attend import STRIP, Attend, Heads, attend
from .attention import by_sequence
from .attention_kernels import try_kernel
from .derivative import differentiable_once
from .head_exchange import putting, taking
from .scores import Kernel, Scores, check_attention
from .shares import Shares, check_partition, features_of, tensor_split
from .ulysses_row import Projection, check_projection, new_strips, wgrad

_OP = "attention_all_to_all_linear"
_ALONE = "attention_all_to_all"


@eager
def attention_all_to_all_linear(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    kernel: Kernel | None = None,
    group: Any,
    shares: Sequence[range] | None = None,
    overlap: Overlap = Overlap(),
) -> torch.Tensor:
    """Attention of the own heads over all rows, exchanged for own rows of all heads, and the output projection.

    The gradients of weight and bias are those of the own rows. As under data parallelism, they are to be summed over
    the ranks (:func:`sum_gradient` does that).

    Args:
        q: queries of the own heads ``[B, H, S, D]``, all rows; a rank may have none (H = 0).
        k: keys ``[B, G, T, D]``; G divides H, and T is S where ``causal``.
        v: values ``[B, G, T, D]``.
        weight: ``[K, N]``, equal on all ranks.
        bias: ``[K]``, equal on all ranks.
        mask: of the own heads, over all rows; it and the further options are those of
            :func:`attention_reduce_scatter`.
        group: process group or one-dimensional DeviceMesh.
        shares: by rank, the range of input features of ``weight`` that its heads have: each feature once. None is
            ``torch.tensor_split`` of the heads.
        overlap: how to overlap.

    Returns:
        The own rows ``[B, S_r, K]``: those that ``torch.tensor_split`` gives this rank.

    Raises:
        ValueError, TypeError: on every rank before anything moves, for arguments that do not fit together or differ
            between ranks.
        PeerError: a peer refused the call, died or stalled.
    """
    heads = Heads(q, k, v, Scores(mask, causal, window, dropout, scale, kernel))
    return _applied(_OP, heads, weight, bias, group, shares, overlap)


@eager
def attention_by_heads(
    heads: Heads,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    group: Any,
    shares: Sequence[range] | None = None,
    overlap: Overlap = Overlap(),
) -> torch.Tensor:
    """The same, of heads."""
    return _applied(_OP, heads, weight, bias, group, shares, overlap)


@eager
def attention_all_to_all(
    heads: Heads, shares: Sequence[range], *, group: Any, overlap: Overlap = Overlap()
) -> torch.Tensor:
    """Attention of the own heads over all rows, exchanged for own rows of all heads.

    Args:
        heads: of this rank, as :func:`attention_all_to_all_linear` takes them.
        shares: by rank, the range of features that its heads have: each feature once.
        group: process group or one-dimensional DeviceMesh.
        overlap: how to overlap.

    Returns:
        The own rows ``[B, S_r, N]`` of all features: those that ``torch.tensor_split`` gives this rank.

    Raises:
        ValueError, TypeError, PeerError: as :func:`attention_all_to_all_linear` does.
    """
    return _applied(_ALONE, heads, None, None, group, shares, overlap)


def _applied(
    op: str,
    heads: Heads,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    group: Any,
    shares: Sequence[range] | None,
    overlap: Overlap,
) -> torch.Tensor:
    scores = heads.scores
    transport = transport_of(group, op, heads.q)
    with refusing(transport):
        check_overlap(op, overlap)
        cast: list[Any] = autocast(*heads[:3], weight, bias)
        needed = 3 if op == _ALONE else 4
        check_tensors(op, cast[0], cast[1:needed], cast[needed:], called="q")
        found = _check(op, cast, scores, shares, transport)
    call = Call(op, transport, overlap, cast[0])
    q, k, _, weight, bias = cast
    flags = grads(*cast)
    agreed = f"bias={bias is not None} {scores.shared} {flags} shares={found}"
    sizes = f"batch={q.shape[0]} queries={q.shape[2]} keys={k.shape[2]} features={q.shape[3]} weight={shape(weight)}"
    shown = f"q {shape(q)}, k {shape(k)}, weight {shape(weight)}, bias {shape(bias)}, {agreed}"
    call.agree("", f"{sizes} {agreed}", shown, shard=q.shape[1])
    scores = scores.drawn(call.rank)
    return _AttentionAllToAll.apply(call, scores, found, *cast)  # pyright: ignore[reportReturnType]


def _check(op: str, tensors: Sequence[Any], scores: Scores, shares: Any, transport: Any) -> Shares:
    q, k, v, weight, bias = tensors
    check_attention(op, q, k, v, scores)
    features = v.shape[3]
    if op == _ALONE:
        found = check_partition(op, shares, q.shape[1] * features, transport)
    else:
        if shares is None and weight.dim() == 2 and features and not weight.shape[1] % features:
            by_head = tensor_split(weight.shape[1] // features, transport.world_size)
            shares = [features_of(heads, features) for heads in by_head]
        found = check_projection(op, weight, bias, shares, transport, q.shape[1] * features)
    try_kernel(op, q, k, v, scores)
    return found


class _AttentionAllToAll(torch.autograd.Function):
    """With a projection or, where ``weight`` is None, without."""

    @staticmethod
    def forward(ctx: Any, call: Call, scores: Scores, shares: Shares, *tensors: Any) -> torch.Tensor:
        q, k, v, weight, bias = tensors
        batch, count, queries, _ = q.shape
        owned = tuple(split_sizes(queries, call.world_size))
        flow, features = "attention_all_to_all", count * v.shape[3]
        heads = attend(Heads(q, k, v, scores))
        choice, rows = call.choose(flow, batch, owned, 1, _sizes(call, heads.heads, weight), STRIP)
        keeps = call.differentiable and any(ctx.needs_input_grad)
        strips = new_strips(q, rows.rows[call.rank], shares) if keeps and ctx.needs_input_grad[6] else []
        z = q.new_empty(batch, owned[call.rank], sum(map(len, shares)) if weight is None else len(weight))
        own = z.flatten(0, 1)
        with call.leased() as lease:
            out = q.new_empty(rows.total, features) if keeps else lease.tensor(rows.total, features, q.dtype)
            swapped = Swapped(rows, call.rank, [shares], [out], lease, to_features=False, strips=[strips])
            total = None
            if weight is None:
                projecting = putting(swapped, own, shares)
            else:
                total = Summed(own, call.accumulate, lease, bias=bias)
                projecting = Projection(swapped, weight, shares).add_to(total)

            def attending(op: Compute) -> None:
                for place in swapped.places(op.writes):
                    for part, which in _queries(rows, place, queries):
                        out[part] = heads.rows(*which)

            kernels: dict[str, Runs] = {"attend": attending, "mm": projecting}
            call.run_schedule(swapped.schedule(flow, choice), choice, swapped.tensor, kernels)
            if total is not None:
                total.finish()
            if strips:
                strips[call.rank] = swapped.strip(0, call.rank)
        ctx.call, ctx.owned, ctx.shares, ctx.scores = call, owned, shares, scores._replace(mask=None)
        if keeps:
            ctx.save_for_backward(q, k, v, weight, out, scores.mask, *heads.saved, *strips)
            ctx.strips = len(strips)
        return z

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, weight, out, mask, *saved = ctx.saved_tensors
        of_kernel, strips = saved[: len(saved) - ctx.strips], saved[len(saved) - ctx.strips :]
        needs, (needs_weight, needs_bias) = ctx.needs_input_grad[3:6], ctx.needs_input_grad[6:]
        dz = grad_outputs[0].contiguous().flatten(0, 1)
        heads = attend(Heads(q, k, v, ctx.scores._replace(mask=mask)), tuple(of_kernel))
        dweight = None

        def local(op: Any = None) -> None:
            nonlocal dweight
            dweight = wgrad(dz, strips, weight, ctx.shares)

        if any(needs):
            heads.begin_backward()
            _run_backward(ctx, heads, weight, out, dz, local if needs_weight else None)
        elif needs_weight:
            local()
        return None, None, None, *heads.found(needs), dweight, dz.sum(0) if needs_bias else None


def _run_backward(
    ctx: Any, heads: Attend, weight: torch.Tensor | None, out: torch.Tensor, dz: torch.Tensor, local: Runs | None
) -> None:
    """Takes the gradient of own rows through the projection, and what comes of it through the attention."""
    call, (batch, _, queries, _) = ctx.call, heads.heads.q.shape
    flow = "attention_all_to_all_backward" + ("" if local else "-w")
    call.agree("backward", f"{flow} owned={ctx.owned}", f"{flow}, rows {list(ctx.owned)}")
    choice, rows = call.choose(flow, batch, ctx.owned, 1, _sizes(call, heads.heads, weight), STRIP)
    with call.leased() as lease:
        dout = lease.tensor(*out.shape, out.dtype)
        swapped = Swapped(rows, call.rank, [ctx.shares], [dout], lease, to_features=True)

        def attending(op: Compute) -> None:
            for part, which in _queries(rows, swapped.place(op.reads[0]), queries):
                heads.gradients(*which, out[part], dout[part])

        if weight is None:
            dgrad = taking(swapped, dz, ctx.shares)
        else:
            dgrad = Projection(swapped, weight, ctx.shares).dgrad(dz)
        kernels = {"mm": dgrad, "attend_backward": attending} | ({"wgrad": local} if local else {})
        call.run_schedule(swapped.schedule(flow, choice), choice, swapped.tensor, kernels, "backward")


def _sizes(call: Call, heads: Heads, weight: torch.Tensor | None) -> dict[str, int]:
    """What a plan goes by: the most heads that any rank has, and their sizes."""
    sizes = {"heads": call.shard, "head_dim": heads.k.shape[3], **heads.scores.met(heads.k.shape[2])}
    return sizes | ({} if weight is None else {"out": len(weight)})


def _queries(rows: Layout, place: Place, queries: int) -> list[tuple[slice, tuple[int, int, int]]]:
    """The rows of a place, cut at the ends of sequences: rows in piece order, (sequence, first query, end)."""
    return [
        (slice(start + at, start + at + end - begin), (sequence, begin, end))
        for start, stop, natural in rows.segments(place.rows)
        for at, sequence, begin, end in by_sequence(natural, stop - start, queries)
    ]
