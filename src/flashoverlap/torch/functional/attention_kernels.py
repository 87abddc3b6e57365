"""Kernels for some queries of one sequence, each a differentiable function of (q, k, v, piece)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from .scores import Kernel, Piece, Scores

_aten = torch.ops.aten

_TILE = 128
_WORD = 2**64 - 1


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece) -> torch.Tensor:
    """torch's scaled_dot_product_attention: ``[1, H, queries, D]`` of q so shaped, and k and v ``[1, G, keys, D]``."""
    if piece.causal and piece.mask is None and piece.window is None:  # fused kernels know this rule by its name
        rule: Any = causal_lower_right(len(piece.queries), len(piece.keys))
    else:
        rule = piece.rule(q.device)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, rule, scale=piece.scale, enable_gqa=grouped)


class Dropped:
    """Attention whose softmax weights are dropped by a mask of seed and positions alone.

    So the mask is the same on recompute, however the queries are cut, which keys are read, and in every mode. It is
    drawn in square tiles of queries and keys, each of a stream of its own.

    Args:
        probability: with which a weight is dropped.
        seed: of the call.
    """

    def __init__(self, probability: float, seed: int) -> None:
        self.probability, self.seed = probability, seed

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece) -> torch.Tensor:
        """The same as :func:`sdpa`; all scores of the piece are in memory."""
        groups, dtype = k.shape[1], q.dtype
        wide = torch.promote_types(dtype, torch.float32)
        kept = self.kept(q.shape[1], piece, q.device)
        q, k, v = q.to(wide).unflatten(1, (groups, -1)), k.to(wide)[:, :, None], v.to(wide)[:, :, None]
        scale = q.shape[-1] ** -0.5 if piece.scale is None else piece.scale
        scores = (q * scale @ k.transpose(-2, -1)).flatten(1, 2)
        rule = piece.rule(q.device)
        if rule is not None:
            scores = scores.masked_fill(~rule, -torch.inf) if rule.dtype == torch.bool else scores + rule
        weights = _aten._safe_softmax(scores, -1).masked_fill(~kept, 0.0)  # zeros where nothing is read
        out = weights.unflatten(1, (groups, -1)) @ (v / (1 - self.probability))
        return out.flatten(1, 2).to(dtype)

    def kept(self, heads: int, piece: Piece, device: torch.device | str) -> torch.Tensor:
        """Which weights stay, ``[1, heads, queries, keys]``."""
        found = torch.empty(1, heads, len(piece.queries), len(piece.keys), dtype=torch.bool, device=device)
        generator = torch.Generator(device)
        tile = torch.empty(heads, _TILE, _TILE, dtype=torch.bool, device=device)
        for row, rows, of_rows in _tiles(piece.queries):
            for column, columns, of_columns in _tiles(piece.keys):
                generator.manual_seed(_mixed(self.seed, piece.sequence, row, column))
                tile.bernoulli_(1 - self.probability, generator=generator)
                found[0, :, rows, columns] = tile[:, of_rows, of_columns]
        return found


def _tiles(positions: range) -> Iterator[tuple[int, slice, slice]]:
    """The tiles that cover these positions: number, place in the range, place in the tile."""
    for number in range(positions.start // _TILE, -(-positions.stop // _TILE)):
        first = number * _TILE
        begin, end = max(first, positions.start), min(first + _TILE, positions.stop)
        yield number, slice(begin - positions.start, end - positions.start), slice(begin - first, end - first)


def _mixed(*numbers: int) -> int:
    """A 32 bit seed, since torch's generator for CPUs takes no more, in which every bit of all numbers counts."""
    state = 0
    for number in numbers:  # the finalizer of splitmix64
        state = (state + number + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state >> 32


def additive(rule: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask to be added to the scores."""
    if rule.dtype != torch.bool:
        return rule
    return torch.zeros(rule.shape, dtype=dtype, device=rule.device).masked_fill_(~rule, -torch.inf)


def try_kernel(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> None:
    """Runs the caller's kernel on the last query and refuses what could not work.

    Raises:
        TypeError: it returns no tensor.
        ValueError: another shape or dtype, trainable tensors that would get no gradient, or randomness.
        Exception: whatever the kernel itself raises.
    """
    if scores.kernel is None or 0 in (*q.shape[:3], k.shape[2]):
        return
    enabled = torch.is_grad_enabled()
    wanted = enabled and (q.requires_grad or k.requires_grad or v.requires_grad)
    piece = scores.piece(0, q.shape[2] - 1, q.shape[2], k.shape[2])
    keys = slice(piece.keys.start, piece.keys.stop)
    tensors = [each.detach() for each in (q[:1, :, -1:], k[:1, :, keys], v[:1, :, keys])]
    with torch.set_grad_enabled(enabled):
        out: Any = run(scores.kernel, tensors, piece)
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"{op}: kernel returned {type(out).__name__}, not a tensor")
        size = (1, q.shape[1], 1, v.shape[-1])
        if out.shape != size or out.dtype != q.dtype:
            raise ValueError(f"{op}: kernel returned {out.dtype} {list(out.shape)}, not {q.dtype} {list(size)}")
        if out.requires_grad:
            raise ValueError(f"{op}: kernel reads trainable tensors beside q, k and v; they would get no gradient")
        again = run(scores.kernel, [each.requires_grad_(wanted) for each in tensors], piece)
    if wanted and not again.requires_grad:
        raise ValueError(f"{op}: kernel is not differentiable, and gradients are wanted")
    if not torch.allclose(out, again, rtol=0.01, equal_nan=True):
        raise ValueError(f"{op}: kernel gives other values when it is called again; it must draw no random numbers")


def run(kernel: Kernel, tensors: Sequence[torch.Tensor], piece: Piece) -> torch.Tensor:
    """Calls a kernel without autocast: its tensors have been cast, and backward may run elsewhere than forward."""
    q, k, v = tensors
    with torch.autocast(q.device.type, enabled=False):
        return kernel(q, k, v, piece)
