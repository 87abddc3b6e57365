"""What queries read: the options of an attention, and their part for some queries of one sequence.

Positions are global: query s of the whole sequence, key t of all keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch

from ..check import shape


class Piece(NamedTuple):
    """The scores of some queries of one sequence: what a kernel is to compute.

    Args:
        sequence: which of the batch.
        queries: positions of the queries.
        keys: positions of the keys that it is given; under ``causal`` the last is that of the last query.
        mask: None, or the caller's for these queries and keys, ``[1, 1 or H, queries, keys]``.
        causal: whether query s reads keys up to s alone.
        window: None, or how many keys a query reads at most: s - window < t <= s.
        scale: of the scores; None is ``D ** -0.5``.
    """

    sequence: int
    queries: range
    keys: range
    mask: torch.Tensor | None
    causal: bool
    window: int | None
    scale: float | None

    def rule(self, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """``mask``, ``causal`` and ``window`` as one mask for these queries and keys; None where all read all."""
        if not self.causal:
            return self.mask
        s = torch.arange(self.queries.start, self.queries.stop, device=device)[:, None]
        t = torch.arange(self.keys.start, self.keys.stop, device=device)
        reads = t <= s
        if self.window is not None:
            reads &= t > s - self.window
        if self.mask is None:
            return reads[None, None]
        return self.mask & reads if self.mask.dtype == torch.bool else self.mask.masked_fill(~reads, -torch.inf)


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Piece], torch.Tensor]


class Scores(NamedTuple):
    """The options of an attention with queries ``[B, H, S, D]`` and keys ``[B, G, T, D]``.

    Args:
        mask: None, or broadcastable to ``[B, H, S, T]``: bool (True takes part) or added to the scores.
        causal: whether query s reads keys up to s alone; S and T are equal then.
        window: None, or with ``causal`` how many keys a query reads at most: s - window < t <= s.
        dropout: probability with which a weight of the softmax is dropped.
        scale: of the scores; None is ``D ** -0.5``.
        kernel: None for torch's own, or a function of the caller's.
        seed: of dropout, see :meth:`drawn`.
    """

    mask: torch.Tensor | None = None
    causal: bool = False
    window: int | None = None
    dropout: float = 0.0
    scale: float | None = None
    kernel: Kernel | None = None
    seed: int | None = None

    @property
    def shared(self) -> str:
        """What must be the same on every rank; a mask may be that of the own heads."""
        mask, causal, window, dropout, scale, kernel, _ = self
        told = f"mask={mask is not None} causal={causal} window={window} dropout={dropout} scale={scale}"
        return f"{told} kernel={kernel is not None}"

    def drawn(self, rank: int) -> Scores:
        """The same with a seed for the dropout of this rank's heads, where there is dropout and no seed yet.

        It is one number of the CPU's ordinary stream, which activation checkpoints restore, and the rank: heads of two
        ranks are dropped differently even where both were seeded alike.
        """
        if not self.dropout or self.seed is not None:
            return self
        return self._replace(seed=int(torch.randint(2**62, ())) + rank)

    def met(self, keys: int) -> dict[str, int]:
        """Of so many keys those that a query reads at most, and whether by the causal rule, as plans go by."""
        read = min(self.window or keys, keys)
        return {"keys": read, "causal": int(self.causal and read == keys)}

    def piece(self, sequence: int, start: int, stop: int, keys: int) -> Piece:
        """What the queries ``start:stop`` of a sequence with so many keys read."""
        end = stop if self.causal else keys
        first = 0 if self.window is None else max(0, start - self.window + 1)
        read, mask = range(first, end), self.mask
        if mask is not None:
            mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
            at = sequence if mask.shape[0] > 1 else 0
            mask = mask[at : at + 1, :, start:stop] if mask.shape[2] > 1 else mask[at : at + 1]
            if mask.shape[3] > 1:
                read = _read(mask, read)
                mask = mask[..., read.start : read.stop]
            mask = mask.expand(-1, -1, stop - start, len(read))
        return Piece(sequence, range(start, stop), read, mask, self.causal, self.window, self.scale)


def _read(mask: torch.Tensor, keys: range) -> range:
    """Of these keys those from the first to the last that a bool mask lets any query read; one at least.

    Masks that leave out most keys (sliding windows, packed sequences, padding) are so not paid for in full. On other
    devices than the CPU, asking costs more than it saves.
    """
    if mask.dtype != torch.bool or mask.device.type != "cpu" or len(keys) < 2:
        return keys
    found = mask[..., keys.start : keys.stop].flatten(0, 2).any(0).nonzero()
    if not len(found):
        return keys[:1]
    return keys[int(found[0]) : int(found[-1]) + 1]


def check_attention(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> None:
    """Refuses attentions that are none, of tensors of one kind.

    Raises:
        TypeError: options of another type.
        ValueError: tensors or options that do not fit together.
    """
    if q.dim() != 4 or k.dim() != 4 or k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise ValueError(f"{op}: q {shape(q)}, k {shape(k)}, v {shape(v)} must be [B, H, S, D] and [B, G, T, D]")
    heads, groups = q.shape[1], k.shape[1]
    if q.shape[-1] != k.shape[-1] or (heads % groups if groups else heads):
        raise ValueError(f"{op}: the heads of q {shape(q)} and k {shape(k)} do not fit")
    _check_options(op, scores)
    if scores.causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{op}: causal=True needs as many queries as keys, not {q.shape[2]} and {k.shape[2]}; queries that follow "
            "cached keys need a mask"
        )
    _check_mask(op, scores.mask, q, k.shape[2])


def _check_options(op: str, scores: Scores) -> None:
    window, dropout, scale = scores.window, scores.dropout, scores.scale
    if not isinstance(scores.causal, bool):
        raise TypeError(f"{op}: causal must be True or False, not {scores.causal!r}")
    if window is not None and (not isinstance(window, int) or isinstance(window, bool)):
        raise TypeError(f"{op}: window must be a whole number or None, not {window!r}")
    for name, number in (("dropout", dropout), ("scale", 0.0 if scale is None else scale)):
        if not isinstance(number, Real):
            raise TypeError(f"{op}: {name} must be a number, not {type(number).__name__}")
    if window is not None and (window < 1 or not scores.causal):
        raise ValueError(f"{op}: window={window} must be 1 or more, with causal=True")
    if not 0 <= dropout < 1:
        raise ValueError(f"{op}: dropout={dropout} must be 0 or more, and less than 1")
    if scores.kernel is not None and not callable(scores.kernel):
        raise TypeError(f"{op}: kernel must be a function or None, not {scores.kernel!r}")
    if scores.kernel is not None and dropout:
        raise ValueError(f"{op}: dropout={dropout} goes without a kernel, which could not draw the same mask again")


def _check_mask(op: str, mask: Any, q: torch.Tensor, keys: int) -> None:
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"{op}: mask must be a tensor or None, not {type(mask).__name__}")
    if mask.dtype not in (torch.bool, torch.float32, q.dtype):
        raise TypeError(f"{op}: mask is {mask.dtype}; bool, float32 or {q.dtype} is needed")
    if mask.device != q.device:
        raise ValueError(f"{op}: q is on {q.device} and mask on {mask.device}")
    if mask.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: mask {shape(mask)} is trainable, and would get no gradient")
    full: Sequence[int] = (*q.shape[:3], keys)
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(sizes) != 4 or any(have not in (1, want) for have, want in zip(sizes, full, strict=True)):
        raise ValueError(f"{op}: mask {shape(mask)} cannot be broadcast to {list(full)}")
