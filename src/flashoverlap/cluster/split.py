"""How the devices of a cluster are divided, and what a model has to say against it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .models import ModelShape


class Split(NamedTuple):
    """``dp`` replicas of ``up * tp`` ranks each; ranks of ``tp`` are neighbours, those of ``dp`` farthest apart."""

    dp: int = 1
    up: int = 1
    tp: int = 1

    @property
    def devices(self) -> int:
        return self.dp * self.up * self.tp

    @property
    def copies(self) -> int:
        """Ranks that have the same weights: those of the replicas, and in each of them those of up."""
        return self.dp * self.up

    def __str__(self) -> str:
        return f"dp {self.dp} x up {self.up} x tp {self.tp}"


class Refusal(NamedTuple):
    """Why a model cannot be split so: a code, and a sentence with the numbers."""

    code: str
    reason: str


def splits_of(devices: int) -> Iterator[Split]:
    """All ways to divide so many devices."""
    for model_ranks in _divisors(devices):
        for tp in _divisors(model_ranks):
            yield Split(devices // model_ranks, model_ranks // tp, tp)


def refusal(model: ModelShape, split: Split, tokens: int) -> Refusal | None:
    """What makes a split impossible; None where nothing does.

    Args:
        tokens: of one replica in one step.
    """
    ranks = split.up * split.tp
    if ranks > model.heads:
        return Refusal("heads", f"{ranks} ranks share {model.heads} heads")
    if model.heads % ranks:
        return Refusal("heads", f"{model.heads} heads do not divide by {ranks} ranks")
    if model.kv_heads % split.tp and split.tp % model.kv_heads:
        return Refusal("kv_heads", f"{model.kv_heads} key and value heads and {split.tp} tensor-parallel ranks")
    if model.ffn % split.tp:
        return Refusal("ffn", f"{model.ffn} features of the MLP do not divide by {split.tp} ranks")
    if tokens < ranks:
        return Refusal("tokens", f"{tokens} tokens for {ranks} ranks")
    return None


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
