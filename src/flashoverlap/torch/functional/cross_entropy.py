"""vocab_parallel_cross_entropy: the loss of logits whose vocabulary is sharded, without gathering them.

M rows on every rank, V entries of the vocabulary, n ranks, rank r
logits_shard [M, V_r]   entries first_r .. first_r + V_r - 1 of all rows; shards may be uneven or empty
labels       [M]        equal on all ranks

local     m_r = max of the own logits, s_r = sum of exp(logit - m_r), t_r = the label's logit, or 0 where another has it
gathered  [M, 3] numbers of each rank, in one round
forward   m = max of m_q,  s = sum_q s_q exp(m_q - m),  loss = log s + m - sum_q t_q    in rank order: same bits on all
backward  local: (exp(logit - m) / s - [entry is the label]) * gradient

memory    the logits, the labels, m and s are kept; rows are worked on in blocks, in float32 (float64 for float64)
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ...overlap import Overlap
from ..call import Call, eager
from ..check import check_tensors, digest, grads, shape
from ..transport import Silent, refusing, transport_of
from .derivative import differentiable_once
from .exchange import whole_tensors

_OP = "vocab_parallel_cross_entropy"
_BLOCK = 1024  # rows that are held in float32 at a time
_REDUCTIONS = ("mean", "sum", "none")


@eager
def vocab_parallel_cross_entropy(
    logits_shard: torch.Tensor,
    labels: torch.Tensor,
    *,
    group: Any = None,
    first: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """The cross entropy of logits whose vocabulary is sharded over the ranks; three numbers a row are exchanged.

    Args:
        logits_shard: ``[..., V_r]``, all rows of the own entries of the vocabulary; or a DTensor ``[..., V]`` sharded
            along its last dimension over a one-dimensional mesh.
        labels: int64 ``[...]``, equal on all ranks.
        group: process group or one-dimensional DeviceMesh; None for a DTensor, which has its own.
        first: number of the first own entry; the shards follow one another in rank order. None for a DTensor.
        ignore_index: rows with this label have neither loss nor gradient.
        reduction: "mean" over the rows that are not ignored (0 where there is none), "sum", or "none".

    Returns:
        The loss with the same bits on all ranks, in float32 (float64 for float64 logits): a scalar, or ``[...]`` for
        "none".

    Raises:
        ValueError, TypeError: on every rank before any logit is read, for arguments that do not fit together or differ
            between ranks, shards that do not follow one another, and labels outside of the vocabulary.
        PeerError: a peer refused the call, died or stalled.
    """
    given = logits_shard
    transport = transport_of(given.device_mesh if isinstance(given, DTensor) and group is None else group, _OP, given)
    with refusing(transport):
        logits, first = _own_shard(given, group, first)
        _check(logits, labels, first, ignore_index, reduction)
    call = Call(_OP, transport, Overlap(), logits)
    rows, size = list(logits.shape[:-1]), logits.shape[-1]
    settings = f"ignore_index={ignore_index} reduction={reduction} {grads(logits)}"
    place = f"{rows} rows, entries {first} to {first + size - 1}"
    # first and size in one number: both lie far below 2**31
    ranges = call.agree("", f"rows={rows} {settings}", f"{place}, {settings}", first << 31 | size)
    unanswered = isinstance(transport, Silent) and transport.world_size > 1  # the others' ranges are not known
    _check_labels(call, labels, ignore_index, 1 << 31 if unanswered else _vocabulary(ranges))
    return _CrossEntropy.apply(call, first, ignore_index, reduction, logits, labels)  # pyright: ignore[reportReturnType]


# --- what is refused --------------------------------------------------------------------------------------------------


def _own_shard(logits: torch.Tensor, group: Any, first: int | None) -> tuple[torch.Tensor, int]:
    """The local logits, and the number of the first entry."""
    if not isinstance(logits, DTensor):
        if isinstance(first, bool) or not isinstance(first, int):
            raise TypeError(f"{_OP}: first must be the number of the first own entry of the vocabulary, not {first!r}")
        return logits, first
    if group is not None or first is not None:
        raise ValueError(f"{_OP}: logits are a DTensor, which says group and first itself; give neither")
    if logits.placements not in ((Shard(-1),), (Shard(logits.dim() - 1),)):
        raise ValueError(f"{_OP}: logits are a DTensor with {logits.placements}; (Shard(-1),) is needed")
    placements = (Shard(logits.dim() - 1),)
    _, offsets = compute_local_shape_and_global_offset(logits.shape, logits.device_mesh, placements)
    # an empty shard's offset may lie beyond the end
    return logits.to_local(), min(offsets[-1], logits.shape[-1])


def _check(logits: torch.Tensor, labels: object, first: int, ignore_index: object, reduction: object) -> None:
    check_tensors(_OP, logits, called="logits")
    if not isinstance(labels, torch.Tensor) or isinstance(labels, DTensor) or labels.dtype != torch.int64:
        what = labels.dtype if isinstance(labels, torch.Tensor) else type(labels).__name__
        raise TypeError(f"{_OP}: labels must be a plain tensor of int64, not {type(labels).__name__} of {what}")
    if logits.dim() == 0 or labels.shape != logits.shape[:-1]:
        raise ValueError(f"{_OP}: labels {shape(labels)} must have one entry for each row of logits {shape(logits)}")
    if labels.device != logits.device:
        raise ValueError(f"{_OP}: logits are on {logits.device} and labels on {labels.device}")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"{_OP}: ignore_index must be a whole number, not {ignore_index!r}")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{_OP}: unknown reduction {reduction!r}; known: {', '.join(_REDUCTIONS)}")
    if not 0 <= first <= first + logits.shape[-1] < 1 << 31:
        raise ValueError(f"{_OP}: first={first} with {logits.shape[-1]} entries lies outside of any vocabulary")


def _vocabulary(ranges: list[int]) -> int:
    """Entries in all, from every rank's ``first << 31 | size``."""
    end, told = 0, [(packed >> 31, packed & (1 << 31) - 1) for packed in ranges]
    for first, size in told:
        if first != end:
            shards = ", ".join(f"{size} from {first}" for first, size in told)
            raise ValueError(f"{_OP}: the ranks hold the entries {shards}; in rank order they must cover 0, 1, ...")
        end += size
    return end


def _check_labels(call: Call, labels: torch.Tensor, ignore_index: int, vocabulary: int) -> None:
    """Raises ValueError on every rank unless all hold the same labels, and each is in the vocabulary."""
    host = labels.detach().cpu()
    digests = call.agree("labels", "", shape(labels), digest(host))
    if len(set(digests)) > 1:
        told = ", ".join(f"rank {rank}: {each:014x}" for rank, each in enumerate(digests))
        raise ValueError(f"{_OP}: the ranks hold different labels; their digests are {told}")
    wrong = host[(host != ignore_index) & ((host < 0) | (host >= vocabulary))]
    if len(wrong):
        raise ValueError(
            f"{_OP}: label {int(wrong[0])} is neither in 0 .. {vocabulary - 1} nor ignore_index={ignore_index}"
        )


# --- forward and backward ---------------------------------------------------------------------------------------------


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, first: int, ignore_index: int, reduction: str, logits: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        flat = labels.reshape(-1)
        numbers = logits.new_empty(3, len(flat), dtype=torch.promote_types(logits.dtype, torch.float32))
        for block, part in _blocks(logits, numbers.dtype):
            numbers[:, block] = torch.stack(_local(part, flat[block] - first))
        with call.leased() as lease:
            maxima, sums, targets = zip(*whole_tensors(call, numbers, lease), strict=True)
            top = torch.stack(maxima).amax(0)
            total, target = torch.zeros_like(top), torch.zeros_like(top)
            for its_top, its_sum, its_target in zip(maxima, sums, targets, strict=True):
                total += its_sum * (its_top - top).exp_()
                target += its_target
        valid = flat != ignore_index
        loss = (total.log() + (top - target)).masked_fill_(~valid, 0.0)
        count = valid.sum().clamp_(min=1) if reduction == "mean" else 1
        ctx.first, ctx.ignore_index, ctx.reduction = first, ignore_index, reduction
        ctx.save_for_backward(logits, labels, top, total)
        return loss.view(labels.shape) if reduction == "none" else loss.sum() / count

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, labels, top, total = ctx.saved_tensors
        flat = labels.reshape(-1)
        valid = flat != ctx.ignore_index
        grad = grad_outputs[0].reshape(-1)  # one number, or one a row
        grad = grad / valid.sum().clamp_(min=1) if ctx.reduction == "mean" else grad
        grad = torch.where(valid, grad, 0.0)
        scale = grad / total
        dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        dflat = dlogits.view(len(flat), logits.shape[-1])
        for block, part in _blocks(logits, top.dtype):
            dpart = (part - top[block, None]).exp_().mul_(scale[block, None])
            own, index = _find(flat[block] - ctx.first, part.shape[1])
            if part.shape[1]:
                dpart.scatter_add_(1, index, torch.where(own, -grad[block], 0.0)[:, None])
            dflat[block] = dpart
        return None, None, None, None, dlogits, None


def _blocks(logits: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """The rows ``[rows, V_r]`` in blocks, in the dtype of the computation."""
    rows = prod(logits.shape[:-1])
    flat = logits.reshape(rows, logits.shape[-1])
    for start in range(0, rows, _BLOCK):
        block = slice(start, min(rows, start + _BLOCK))
        yield block, flat[block].to(dtype)


def _local(part: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row: the maximum, the sum of exponentials relative to it, and the label's logit or 0."""
    if not part.shape[1]:
        none = part.new_zeros(len(part))
        return none - torch.inf, none, none
    top = part.amax(1)
    shift = top.masked_fill(top == -torch.inf, 0.0)  # -inf less itself would be nan
    own, index = _find(labels, part.shape[1])
    return top, (part - shift[:, None]).exp_().sum(1), torch.where(own, part.gather(1, index)[:, 0], 0.0)


def _find(labels: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which labels, counted from the first own entry, are this rank's; and indices that are always in range."""
    own = (labels >= 0) & (labels < size)
    return own, labels.clamp(0, max(size - 1, 0))[:, None]
