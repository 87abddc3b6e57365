"""Prefill, and cached decode one token at a time, on a model whose heads may be sharded."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn

import flashoverlap.torch as fo

from .options import Sampling


@dataclass
class Generated:
    """What one rank generated, and what it took.

    Attributes:
        tokens: with the end token, where one came.
        prefill_s: seconds from the prompt to the first token.
        decode_s: seconds for all tokens after the first.
        records: what the report had of each phase.
    """

    tokens: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    records: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def generate(
    model: nn.Module,
    prompt: Sequence[int],
    tokens: int,
    sampling: Sampling,
    end_tokens: Collection[int] = (),
    show: Callable[[int], None] = lambda token: None,
) -> Generated:
    """Continues a prompt.

    Args:
        model: a causal language model of transformers; its logits are whole, and the same on every rank.
        prompt: tokens; at least one.
        tokens: how many to generate at most.
        sampling: how each is chosen; the draws are the same on every rank.
        end_tokens: any of them is the last.
        show: called with each token as it comes.
    """
    from transformers import DynamicCache  # late: takes seconds

    cache = DynamicCache(config=model.config)  # pyright: ignore[reportArgumentType]
    choose = Chooser(sampling)
    made = Generated()
    new, seen = list(prompt), 0
    with torch.inference_mode():
        for phase in ("prefill", "decode"):
            fo.report().clear()
            start_s = time.perf_counter()
            for _ in range(1 if phase == "prefill" else tokens - 1):
                logits = forward(model, new, seen, cache)
                seen += len(new)
                new = [choose(logits)]
                made.tokens += new
                show(new[0])
                if new[0] in end_tokens:
                    break
            spent_s = time.perf_counter() - start_s
            made.records[phase] = modes()
            if phase == "prefill":
                made.prefill_s = spent_s
            else:
                made.decode_s = spent_s
            if new[0] in end_tokens:
                break
    return made


def forward(model: nn.Module, new: Sequence[int], seen: int, cache: Any) -> torch.Tensor:
    """The logits [V] of the token after ``new``, of which ``seen`` tokens are in the cache already."""
    positions = torch.arange(seen, seen + len(new))[None]  # global: every rank sees all rows
    out = model(
        input_ids=torch.tensor([list(new)]),
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
        **{cache_argument(type(model)): cache},
    )
    return out.logits[0, -1]


@lru_cache
def cache_argument(kind: type) -> str:
    """What a model calls the argument for its cache: ``past_key_values``, or ``cache`` in newer versions."""
    for base in kind.__mro__:  # parallelize puts a class with a forward of its own in front
        names = inspect.signature(base.forward).parameters if hasattr(base, "forward") else {}
        if "cache" in names or "past_key_values" in names:
            return "cache" if "cache" in names else "past_key_values"
    raise ValueError(f"{kind.__name__} takes no cache of keys and values")


class Chooser:
    """Chooses a token from logits; the same one on every rank that has the same logits."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: torch.Tensor) -> int:
        """The token for logits [V].

        Raises:
            ValueError: the logits are not finite.
        """
        if not logits.isfinite().all():
            raise ValueError(f"the model's logits are not finite in {logits.dtype}; a wider --dtype may help")
        if self._sampling.greedy:
            return int(logits.argmax())
        kept, order = (logits.float() / self._sampling.temperature).sort(descending=True, stable=True)
        kept, order = kept[: self._sampling.top_k], order[: self._sampling.top_k]
        chances = kept.softmax(-1)
        before = chances.cumsum(-1) - chances  # the most likely token has nothing before it, and always stays
        chances = chances.masked_fill(before >= self._sampling.top_p, 0) if self._sampling.top_p < 1 else chances
        return int(order[torch.multinomial(chances, 1, generator=self._generator)])


def modes() -> list[dict[str, Any]]:
    """The report so far, call sites of one operator and mode in one."""
    summed: dict[tuple[str, ...], dict[str, Any]] = {}
    for record in fo.report():
        key = (record.op, record.mode_asked, record.mode_taken, record.detail, record.reason_code)
        names = ("op", "mode_asked", "mode_taken", "detail", "reason_code")
        entry = summed.setdefault(key, {**dict(zip(names, key, strict=True)), "calls": 0, "bytes": 0, "blocked_s": 0.0})
        entry["calls"] += record.calls
        entry["bytes"] += record.bytes
        entry["blocked_s"] += record.blocked_s
    return list(summed.values())
