"""Attention of some of the queries at a time, forward and backward, by kernels that are not ours.

Rows are queries of one sequence; out rows [rows, H * D] hold the heads side by side.

causal   queries start:stop read keys 0:start, all of them, and keys start:stop by the causal rule among themselves. Two
         such blocks of keys make one softmax: with l the log of a block's sum of exponentials, out = sum of
         out_i exp(l_i - l), and a block's backward needs out and l of all blocks together.
window   a strip of queries reads the keys from the window of its first query to its last query; strips are short
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .attention_kernels import Dropped, additive, run, sdpa
from .scores import Kernel, Piece, Scores

_aten = torch.ops.aten

# Queries of a strip, up to twice as many. With fewer, torch's flash kernel for CPUs is slower (by 5 % forward and 8 %
# backward below 768); with more, it reads keys that most of them do not need, and their gradients are in memory twice.
STRIP, _NARROW = 768, 192
_KEYS = 512  # at a time, backward: their gradients too


class Heads(NamedTuple):
    """The tensors of an attention: q ``[B, H, S, D]``, k and v ``[B, G, T, D]``, G a divisor of H, and what is read."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scores: Scores = Scores()

    def cut(self, piece: Piece) -> list[torch.Tensor]:
        """q, k and v of a piece."""
        sequence = slice(piece.sequence, piece.sequence + 1)
        queries, keys = (slice(each.start, each.stop) for each in (piece.queries, piece.keys))
        return [self.q[sequence, :, queries], self.k[sequence, :, keys], self.v[sequence, :, keys]]


class Attend(ABC):
    """Attention by rows, and the gradients that come together from their backward passes."""

    def __init__(self, heads: Heads) -> None:
        self.heads = heads
        self.dq = self.dk = self.dv = torch.empty(0)

    def rows(self, batch: int, start: int, stop: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """Out rows of the queries ``start:stop`` of one sequence; ``into`` is where, if they have a place."""
        q, v = self.heads.q, self.heads.v
        if into is None:
            into = q.new_empty(stop - start, q.shape[1] * v.shape[-1])
        by_head = _by_head(into, q.shape[1])
        for piece in self._pieces(batch, start, stop):
            by_head[:, :, piece.queries.start - start : piece.queries.stop - start] = self._forward(piece)
        return into

    def gradients(self, batch: int, start: int, stop: int, out: torch.Tensor, grad: torch.Tensor) -> None:
        """Adds what comes of the gradient of these out rows to dq, dk and dv."""
        for piece in self._pieces(batch, start, stop):
            rows = slice(piece.queries.start - start, piece.queries.stop - start)
            self._backward(piece, *(_by_head(each[rows], self.heads.q.shape[1]) for each in (out, grad)))

    @abstractmethod
    def _forward(self, piece: Piece) -> torch.Tensor:
        """Out ``[1, H, queries, D]``."""

    @abstractmethod
    def _backward(self, piece: Piece, out: torch.Tensor, grad: torch.Tensor) -> None:
        """Adds to the gradients by :meth:`_add`."""

    def _add(self, queries: range, keys: range, sequence: int, grads: tuple[torch.Tensor, ...]) -> None:
        dq, dk, dv = grads
        self.dq[sequence, :, queries.start : queries.stop] += dq[0]
        self.dk[sequence, :, keys.start : keys.stop] += dk[0]
        self.dv[sequence, :, keys.start : keys.stop] += dv[0]

    def _pieces(self, batch: int, start: int, stop: int) -> Iterator[Piece]:
        """The queries in even strips: short ones where those read fewer keys; none on a rank without heads."""
        if not self.heads.q.shape[1]:
            return
        scores, keys, on_cpu = self.heads.scores, self.heads.k.shape[2], self.heads.q.device.type == "cpu"
        by_row = scores.mask is not None and scores.mask.dtype == torch.bool and scores.mask.shape[-2:-1] > (1,)
        narrow = (by_row and on_cpu) or (scores.window is not None and scores.window < stop) or scores.dropout > 0
        strip = _NARROW if narrow else STRIP if scores.causal and on_cpu else stop - start
        count = 1 if scores.kernel is not None else max(1, (stop - start) // max(1, strip))
        for index in range(count):
            begin, end = (start + (stop - start) * each // count for each in (index, index + 1))
            yield scores.piece(batch, begin, end, keys)

    def begin_backward(self) -> None:
        """Makes room for the gradients; those of k and v are sums, in float32 at least."""
        q, k, v = self.heads[:3]
        wide = torch.promote_types(q.dtype, torch.float32)
        # laid out as q, k and v are: rows of [S, H, D] seen by head go back to their projection without a copy
        self.dq = torch.zeros_like(q)
        self.dk, self.dv = (torch.zeros_like(each, dtype=wide) for each in (k, v))

    def found(self, needs: Sequence[bool]) -> list[torch.Tensor | None]:
        """The gradients of q, k and v, those that are needed."""
        sums = zip((self.dq, self.dk, self.dv), needs, strict=True)
        return [total.to(self.heads.q.dtype) if need else None for total, need in sums]

    @property
    def saved(self) -> tuple[torch.Tensor, ...]:
        """What backward needs beside q, k, v and out."""
        return ()


def attend(heads: Heads, saved: tuple[torch.Tensor, ...] = ()) -> Attend:
    """The kernel for these tensors; ``saved`` where it is for backward."""
    q, k, v = (each if each.stride(-1) == 1 else each.contiguous() for each in heads[:3])  # flash kernels do not ask
    heads, scores = Heads(q, k, v, heads.scores), heads.scores
    flash = q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and k.shape[2] > 0
    if flash and not scores.dropout and scores.kernel is None:
        return FlashCpu(heads, *saved)
    return Recomputed(heads)


def attention(heads: Heads) -> torch.Tensor:
    """All of an attention ``[B, H, S, D]``, by autograd; its dropout is that of its pieces."""
    q, k, v, scores = heads
    kernel = _kernel(scores)
    if kernel is not sdpa or scores.window is not None or (scores.causal and scores.mask is not None):
        whole = [scores.piece(each, 0, q.shape[2], k.shape[2]) for each in range(q.shape[0])]
        return torch.cat([run(kernel, heads.cut(piece), piece) for piece in whole])
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, scores.mask, 0.0, scores.causal, scale=scores.scale, enable_gqa=grouped
    )


def _kernel(scores: Scores) -> Kernel:
    if scores.dropout:
        assert scores.seed is not None, "dropout without Scores.drawn"
        return Dropped(scores.dropout, scores.seed)
    return sdpa if scores.kernel is None else scores.kernel


class FlashCpu(Attend):
    """torch's flash kernel for CPUs, one call a block of keys; queries that a mask leaves nothing get zeros from it."""

    def __init__(self, heads: Heads, lse: torch.Tensor | None = None) -> None:
        super().__init__(heads)
        wide = torch.promote_types(heads.q.dtype, torch.float32)
        self.lse = heads.q.new_empty(heads.q.shape[:3], dtype=wide) if lse is None else lse

    @property
    def saved(self) -> tuple[torch.Tensor, ...]:
        return (self.lse,)

    def _blocks(self, piece: Piece) -> Iterator[tuple[Piece, bool, torch.Tensor | None]]:
        """The keys of a piece, block by block; whether by the causal rule, and the mask."""
        start = piece.queries.start
        if piece.causal and piece.mask is None and not _binds(piece):
            if start:
                yield piece._replace(keys=range(start)), False, None
            yield piece._replace(keys=piece.queries), True, None
        else:
            rule = piece.rule()
            yield piece, False, None if rule is None else additive(rule, self.heads.q.dtype)

    def _forward(self, piece: Piece) -> torch.Tensor:
        out = lse = None
        for block, causal, mask in self._blocks(piece):
            kernel = _aten._scaled_dot_product_flash_attention_for_cpu
            part, log = kernel(*self.heads.cut(block), 0.0, causal, attn_mask=mask, scale=piece.scale)
            if out is None or lse is None:
                out, lse = part, log
                continue
            both = torch.logaddexp(lse, log)
            out.mul_((lse - both).exp()[..., None].to(out.dtype))
            out.addcmul_(part, (log - both).exp()[..., None].to(out.dtype))
            lse = both
        assert out is not None
        assert lse is not None
        self.lse[piece.sequence, :, piece.queries.start : piece.queries.stop] = lse[0]
        return out

    def _backward(self, piece: Piece, out: torch.Tensor, grad: torch.Tensor) -> None:
        lse = self.lse[piece.sequence, :, piece.queries.start : piece.queries.stop][None]
        kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        for block, causal, mask in self._blocks(piece):
            for keys in [block.keys] if causal else _cut(block.keys):
                q, k, v = self.heads.cut(block._replace(keys=keys))
                part = mask if mask is None else mask[..., keys.start - block.keys.start : keys.stop - block.keys.start]
                options = {"attn_mask": part, "scale": piece.scale}  # no name for what comes: it would be kept too long
                self._add(block.queries, keys, block.sequence, kernel(grad, q, k, v, out, lse, 0.0, causal, **options))


def _cut(keys: range) -> Iterator[range]:
    """Blocks of keys; the gradients of so many at a time are in memory beside their sums."""
    return (keys[first : first + _KEYS] for first in range(0, len(keys), _KEYS))


def _binds(piece: Piece) -> bool:
    """Whether a window leaves out keys that the causal rule has."""
    return piece.window is not None and piece.window < piece.queries.stop


class Recomputed(Attend):
    """Any other kernel; backward runs it again, on one piece at a time, under autograd."""

    def __init__(self, heads: Heads) -> None:
        super().__init__(heads)
        self._kernel = _kernel(heads.scores)

    def _forward(self, piece: Piece) -> torch.Tensor:
        return run(self._kernel, self.heads.cut(piece), piece)

    def _backward(self, piece: Piece, out: torch.Tensor, grad: torch.Tensor) -> None:
        leaves = [each.detach().requires_grad_() for each in self.heads.cut(piece)]
        with torch.enable_grad():
            again = run(self._kernel, leaves, piece)
        self._add(
            piece.queries, piece.keys, piece.sequence, torch.autograd.grad(again, leaves, grad, materialize_grads=True)
        )


def _by_head(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """``[rows, H * D]`` as ``[1, H, rows, D]``."""
    return rows.unflatten(1, (heads, rows.shape[1] // max(1, heads))).transpose(0, 1)[None]
