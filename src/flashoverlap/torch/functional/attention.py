"""attention_reduce_scatter: attention of the own heads and the output projection, before a scatter of its rows.

B sequences of S tokens, n ranks, rank r with H query heads and G key/value heads of D features, N output features
q            [B, H, S, D]
k, v         [B, G, T, D]
weight_shard [N, H * D]       input features of rank r
z_shard      [B, S_r, N]      rows of rank r (those of torch.tensor_split)

forward   z_r = sum_q attention_q(rows of r) W_q^T + b   scatter side: attention and projection of others' queries
                                                         first, own queries last
backward  dz is gathered; a piece of it goes through the projection and through the attention of its queries; dk and dv
          are sums over all pieces; dW_r = dz^T out is one matmul over all rows

memory    q, k, v, the rows between attention and projection, and a number for each query and head

The idea is query-split attention of arXiv 2604.24013: cut by queries, attention hides the scatter that follows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...overlap import Overlap
from ...patterns import split_sizes
from ..call import Call, eager
from ..check import autocast, check_linear, check_overlap, check_tensors, grads, shape
from ..pieces import Gathered
from ..transport import refusing, transport_of
from .attend import Heads, attend
from .derivative import differentiable_once
from .kernels import matmul, matmul_into

_OP = "attention_reduce_scatter"


@eager
def attention_reduce_scatter(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_shard: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    group: Any,
    overlap: Overlap = Overlap(),
) -> torch.Tensor:
    """``reduce_scatter(attention(q, k, v) @ weight_shard.T) + bias``, piece by piece of the queries.

    Args:
        q: queries of the own heads ``[B, H, S, D]``, all rows.
        k: keys ``[B, G, T, D]``; G divides H, and T is S where ``causal``.
        v: values ``[B, G, T, D]``.
        weight_shard: ``[N, H * D]``.
        bias: ``[N]``, the full bias, equal on all ranks; added once.
        mask: None, or broadcastable to ``[B, H, S, T]``: bool (True takes part) or added to the scores; not with
            ``causal``. It gets no gradient.
        causal: whether query s reads the keys up to s alone.
        scale: of the scores; None is ``D ** -0.5``.
        group: process group or one-dimensional DeviceMesh.
        overlap: how to overlap.

    Returns:
        The own rows ``[B, S_r, N]``: those that ``torch.tensor_split`` gives this rank.

    Raises:
        ValueError, TypeError: on every rank before anything moves, for arguments that do not fit together or differ
            between ranks.
        PeerError: a peer refused the call, died or stalled.
    """
    transport = transport_of(group, _OP, q)
    with refusing(transport):
        check_overlap(_OP, overlap)
        cast: list[Any] = autocast(q, k, v, weight_shard, bias)
        check_tensors(_OP, cast[0], cast[1:4], cast[4:])
        _check_shapes(cast, mask, causal)
    call = Call(_OP, transport, overlap, cast[0])
    batch, _, rows, _ = cast[0].shape
    flags = grads(q, k, v, weight_shard, bias)
    shared = f"batch={batch} rows={rows} out={cast[3].shape[0]} bias={bias is not None} {causal} {scale} {flags}"
    shown = f"q {shape(cast[0])}, k {shape(cast[1])}, weight {shape(cast[3])}, bias {shape(bias)}, {flags}"
    call.agree("", shared, shown)
    return _AttentionReduceScatter.apply(call, mask, causal, scale, *cast)  # pyright: ignore[reportReturnType]


def _check_shapes(tensors: Sequence[Any], mask: Any, causal: bool) -> None:
    q, k, v, weight, bias = tensors
    if q.dim() != 4 or k.dim() != 4 or k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise ValueError(f"{_OP}: q {shape(q)}, k {shape(k)}, v {shape(v)} must be [B, H, S, D] and [B, G, T, D]")
    if q.shape[-1] != k.shape[-1] or k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{_OP}: the heads of q {shape(q)} and k {shape(k)} do not fit")
    if causal and (mask is not None or q.shape[2] != k.shape[2]):
        given = f"mask {shape(mask)}, {q.shape[2]} queries, {k.shape[2]} keys"
        raise ValueError(f"{_OP}: causal=True goes without a mask, with as many queries as keys, not with {given}")
    if mask is not None:
        full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        if mask.dim() != 4 or any(have not in (1, want) for have, want in zip(mask.shape, full, strict=True)):
            raise ValueError(f"{_OP}: mask {shape(mask)} cannot be broadcast to {list(full)}")
    features = q.shape[1] * v.shape[-1]
    check_linear(_OP, torch.empty(1, features, device="meta"), weight, bias)


class _AttentionReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, mask: Any, causal: bool, scale: float | None, *tensors: Any) -> torch.Tensor:
        q, k, v, weight, bias = tensors
        batch, count, queries, _ = q.shape
        owned = tuple(split_sizes(queries, call.world_size))
        flow, columns = "matmul_reduce_scatter", weight.shape[0]
        choice = call.choose(flow, [batch * part for part in owned])
        rows = call.layout(choice, batch, owned, 1)
        heads = attend(Heads(q, k, v, mask, causal, scale))
        keep = call.differentiable and any(ctx.needs_input_grad)
        out = q.new_empty(batch * queries, count * v.shape[-1]) if keep else None
        z = q.new_empty(batch, owned[call.rank], columns)
        transposed = weight.t()
        with call.leased() as lease:
            scattered = call.scattered(rows, choice, z.view(-1, columns), lease, bias)

            def product(names: tuple[str, ...], target: torch.Tensor, first: int, beta: float) -> None:
                for start, stop, natural in rows.segments(names):
                    for at, sequence, begin, end in _by_sequence(natural, stop - start, queries):
                        made = heads.rows(sequence, begin, end)
                        if out is not None:
                            out[natural + at : natural + at + end - begin] = made
                        place = start - first + at
                        matmul_into(target[place : place + end - begin], made, transposed, beta)

            kernels = {"mm": lambda op: scattered.multiply(op, product), "": scattered.add}
            call.run(flow, choice, rows.rows, {"p": columns * q.itemsize}, scattered.tensor, kernels)
            if choice.pattern == "collective":
                scattered.collected()
        ctx.call, ctx.owned, ctx.causal, ctx.scale = call, owned, causal, scale
        ctx.save_for_backward(q, k, v, weight, out, mask, *(heads.saved if keep else ()))
        return z

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: Call = ctx.call
        q, k, v, weight, out, mask, *saved = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[7:]
        needs_heads = any(ctx.needs_input_grad[4:7])
        batch, _, queries, _ = q.shape
        flow = "row_backward" + ("" if needs_weight or needs_bias else "-w") + ("" if needs_heads else "-y")
        call.agree("backward", f"{flow} owned={ctx.owned}", f"{flow}, rows {list(ctx.owned)}")
        choice = call.choose(flow, [batch * part for part in ctx.owned])
        rows = call.layout(choice, batch, ctx.owned, 1)
        columns = weight.shape[0]
        own = grad_outputs[0].contiguous().view(-1, columns)
        heads = attend(Heads(q, k, v, mask, ctx.causal, ctx.scale), tuple(saved))
        heads.begin_backward()
        dweight = dbias = None
        with call.leased() as lease:
            gathered = Gathered(rows, call.rank, own, lease.tensor(rows.total, columns, q.dtype))

            def mm(op: Any) -> None:
                for part, start, stop in gathered.natural_runs(op.reads):
                    for at, sequence, begin, end in _by_sequence(start, stop - start, queries):
                        grad = matmul(part[at : at + end - begin], weight)
                        heads.gradients(sequence, begin, end, out[start + at : start + at + end - begin], grad)

            def wgrad(op: Any) -> None:
                nonlocal dweight, dbias
                dz = rows.to_natural(gathered.all())
                dweight = matmul(dz.t(), out) if needs_weight else None
                dbias = dz.sum(0) if needs_bias else None

            widths, kernels = {"x": columns * q.itemsize}, {"mm": mm, "wgrad": wgrad}
            call.run(flow, choice, rows.rows, widths, gathered.tensor, kernels, "backward")
        found = [grad.to(q.dtype) for grad in (heads.dq, heads.dk, heads.dv)]
        wanted = [grad if need else None for grad, need in zip(found, ctx.needs_input_grad[4:7], strict=True)]
        return None, None, None, None, *wanted, dweight, dbias


def _by_sequence(natural: int, count: int, queries: int) -> Iterator[tuple[int, int, int, int]]:
    """Cuts ``count`` rows from ``natural`` on at the ends of sequences: (offset, sequence, first query, end)."""
    at = 0
    while at < count:
        sequence, begin = divmod(natural + at, queries)
        end = min(queries, begin + count - at)
        yield at, sequence, begin, end
        at += end - begin
