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

keys      a piece of queries start:stop reads keys 0:stop (causal), start-window+1:stop (window), or those from the
          first to the last that a bool mask lets through
dropout   what is dropped follows from a seed and the positions, so from no cut; backward draws it again

memory    q, k, v, the rows between attention and projection, and a number for each query and head

The idea is query-split attention of arXiv 2604.24013: cut by queries, attention hides the scatter that follows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...overlap import Overlap
from ...patterns import split_sizes
from ..call import Call, eager
from ..check import autocast, check_overlap, check_tensors, check_weight, grads, shape
from ..pieces import Gathered
from ..transport import refusing, transport_of
from .attend import STRIP, Heads, attend
from .attention_kernels import try_kernel
from .derivative import differentiable_once
from .kernels import matmul, matmul_into
from .scores import Kernel, Scores, check_attention

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
    window: int | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    kernel: Kernel | None = None,
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
        mask: None, or broadcastable to ``[B, H, S, T]``: bool (True takes part) or added to the scores, float32 or of
            the dtype of q. It gets no gradient. Queries that read nothing give zeros.
        causal: whether query s reads the keys up to s alone.
        window: None, or with ``causal`` how many keys a query reads at most: s - window < t <= s.
        dropout: probability with which a weight of the softmax is dropped, by a mask that differs from rank to rank
            and is the same on recompute. It is drawn by a seed from torch's ordinary CPU stream.
        scale: of the scores; None is ``D ** -0.5``.
        kernel: None for torch's own, or a differentiable function ``(q, k, v, piece) -> out`` that takes their place
            for some queries ``[1, H, queries, D]`` and the keys ``[1, G, keys, D]`` that they read. The
            :class:`~flashoverlap.torch.functional.scores.Piece` holds their global positions and the options above
            that it has to heed. Backward runs it again. It captures no trainable tensors and draws no random numbers.
        group: process group or one-dimensional DeviceMesh.
        overlap: how to overlap.

    Returns:
        The own rows ``[B, S_r, N]``: those that ``torch.tensor_split`` gives this rank.

    Raises:
        ValueError, TypeError: on every rank before anything moves, for arguments that do not fit together or differ
            between ranks.
        PeerError: a peer refused the call, died or stalled.
    """
    heads = Heads(q, k, v, Scores(mask, causal, window, dropout, scale, kernel))
    return attention_by_queries(heads, weight_shard, bias, group=group, overlap=overlap)


@eager
def attention_by_queries(
    heads: Heads, weight_shard: torch.Tensor, bias: torch.Tensor | None, *, group: Any, overlap: Overlap
) -> torch.Tensor:
    """The same, of heads."""
    scores = heads.scores
    transport = transport_of(group, _OP, heads.q)
    with refusing(transport):
        check_overlap(_OP, overlap)
        cast: list[Any] = autocast(*heads[:3], weight_shard, bias)
        q, k, v, weight, bias = cast
        check_tensors(_OP, q, (k, v, weight), (bias,), called="q")
        check_attention(_OP, q, k, v, scores)
        _check_projection(q, v, weight, bias)
        try_kernel(_OP, q, k, v, scores)
    call = Call(_OP, transport, overlap, q)
    flags = grads(*cast)
    agreed = f"bias={bias is not None} {scores.shared} {flags}"
    shown = f"q {shape(q)}, k {shape(k)}, weight {shape(weight)}, bias {shape(bias)}, {scores.shared}, {flags}"
    call.agree("", f"batch={q.shape[0]} rows={q.shape[2]} out={weight.shape[0]} {agreed}", shown, shard=q.shape[1])
    return _AttentionReduceScatter.apply(call, scores.drawn(call.rank), *cast)  # pyright: ignore[reportReturnType]


def _check_projection(q: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    check_weight(_OP, weight, bias)
    features = q.shape[1] * v.shape[-1]
    if weight.shape[1] != features:
        raise ValueError(f"{_OP}: weight {shape(weight)} and the heads, {features} in all, differ in input features")


class _AttentionReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, scores: Scores, *tensors: Any) -> torch.Tensor:
        q, k, v, weight, bias = tensors
        batch, count, queries, _ = q.shape
        owned = tuple(split_sizes(queries, call.world_size))
        flow, columns = "matmul_reduce_scatter", weight.shape[0]
        choice, rows = call.choose(flow, batch, owned, 1, _sizes(call, v, columns, scores), STRIP)
        heads = attend(Heads(q, k, v, scores))
        keep = call.differentiable and any(ctx.needs_input_grad)
        out = q.new_empty(batch * queries, count * v.shape[-1]) if keep else None
        z = q.new_empty(batch, owned[call.rank], columns)
        transposed = weight.t()
        with call.leased() as lease:
            scattered = call.scattered(rows, choice, z.view(-1, columns), lease, bias)

            def product(names: tuple[str, ...], target: torch.Tensor, first: int, beta: float) -> None:
                for start, stop, natural in rows.segments(names):
                    for at, sequence, begin, end in by_sequence(natural, stop - start, queries):
                        kept = None if out is None else out[natural + at : natural + at + end - begin]
                        made = heads.rows(sequence, begin, end, kept)
                        place = start - first + at
                        matmul_into(target[place : place + end - begin], made, transposed, beta)

            kernels = {"mm": lambda op: scattered.multiply(op, product), "": scattered.add}
            call.run(flow, choice, rows.rows, {"p": columns * q.itemsize}, scattered.tensor, kernels)
            scattered.finish()
        ctx.call, ctx.owned, ctx.scores = call, owned, scores._replace(mask=None)
        ctx.save_for_backward(q, k, v, weight, out, scores.mask, *(heads.saved if keep else ()))
        return z

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: Call = ctx.call
        q, k, v, weight, out, mask, *saved = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[5:]
        needs_heads = any(ctx.needs_input_grad[2:5])
        batch, _, queries, _ = q.shape
        flow = "row_backward" + ("" if needs_weight or needs_bias else "-w") + ("" if needs_heads else "-y")
        call.agree("backward", f"{flow} owned={ctx.owned}", f"{flow}, rows {list(ctx.owned)}")
        columns = weight.shape[0]
        choice, rows = call.choose(flow, batch, ctx.owned, 1, _sizes(call, v, columns, ctx.scores), STRIP)
        own = grad_outputs[0].contiguous().view(-1, columns)
        heads = attend(Heads(q, k, v, ctx.scores._replace(mask=mask)), tuple(saved))
        heads.begin_backward()
        dweight = dbias = None
        with call.leased() as lease:
            gathered = Gathered(rows, call.rank, own, lease.tensor(rows.total, columns, q.dtype))

            def mm(op: Any) -> None:
                for part, start, stop in gathered.natural_runs(op.reads):
                    for at, sequence, begin, end in by_sequence(start, stop - start, queries):
                        size = end - begin
                        made = out[start + at : start + at + size]
                        heads.gradients(sequence, begin, end, made, matmul(part[at : at + size], weight))

            def wgrad(op: Any) -> None:
                nonlocal dweight, dbias
                dz = rows.to_natural(gathered.all())
                dweight = matmul(dz.t(), out) if needs_weight else None
                dbias = dz.sum(0) if needs_bias else None

            widths, kernels = {"x": columns * q.itemsize}, {"mm": mm, "wgrad": wgrad}
            call.run(flow, choice, rows.rows, widths, gathered.tensor, kernels, "backward")
        return None, None, *heads.found(ctx.needs_input_grad[2:5]), dweight, dbias


def _sizes(call: Call, v: torch.Tensor, columns: int, scores: Scores) -> dict[str, int]:
    """What a plan goes by: the most heads that any rank has, and the keys that a query meets."""
    return {"heads": call.shard, "head_dim": v.shape[-1], **scores.met(v.shape[2]), "out": columns}


def by_sequence(natural: int, count: int, queries: int) -> Iterator[tuple[int, int, int, int]]:
    """Cuts ``count`` rows from ``natural`` on at the ends of sequences: (offset, sequence, first query, end)."""
    at = 0
    while at < count:
        sequence, begin = divmod(natural + at, queries)
        end = min(queries, begin + count - at)
        yield at, sequence, begin, end
        at += end - begin
