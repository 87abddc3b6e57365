"""What is to be generated: checked before anything starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..lab import Lab
from ..overlap import DTYPES, MODES


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: 0 takes the most likely token; otherwise logits are divided by it and a token is drawn.
        top_k: draw among this many most likely tokens only; None is all.
        top_p: draw among the most likely tokens only that together have this probability.
        seed: of the draws; the same on every rank.

    Raises:
        ValueError: a number out of range, or a limit on draws where none are made.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"--temperature {self.temperature:g}: a number of 0 or more is needed")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"--top-k {self.top_k}: at least 1 is needed")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p:g}: a number above 0 and up to 1 is needed")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed {self.seed}: a whole number of 0 or more, below 2**63, is needed")
        limits = [f"--top-k {self.top_k}"] if self.top_k is not None else []
        limits += [f"--top-p {self.top_p:g}"] if self.top_p < 1 else []
        if self.greedy and limits:
            raise ValueError(f"{limits[0]} goes with a --temperature above 0; at 0 the most likely token is taken")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


@dataclass(frozen=True)
class Options:
    """One run of ``flashoverlap generate``.

    Args:
        checkpoint: folder of a model.
        prompt: text that is continued.
        ranks: processes, one compute thread each.
        link: rate of each rank's link as in "1gbit", or "none" for plain loopback.
        tokens: how many to generate at most.
        sampling: how each is chosen.
        dtype: of the parameters, whatever the files have.
        overlap: mode of :class:`flashoverlap.Overlap`.

    Raises:
        ValueError: an unknown name or a number out of range; the message has the option and its value.
    """

    checkpoint: str
    prompt: str
    ranks: int = 2
    link: str = "none"
    tokens: int = 64
    sampling: Sampling = Sampling()
    dtype: str = "float32"
    overlap: str = "auto"

    def __post_init__(self) -> None:
        Lab(self.ranks, self.link)  # checks both
        for option, value, known in (("dtype", self.dtype, DTYPES), ("overlap", self.overlap, MODES)):
            if value not in known:
                raise ValueError(f"--{option} {value}: unknown; known: {', '.join(known)}")
        if self.tokens < 1:
            raise ValueError(f"--tokens {self.tokens}: at least 1 is needed")
        if not self.prompt:
            raise ValueError("--prompt is empty; at least one token is needed to go on from")
