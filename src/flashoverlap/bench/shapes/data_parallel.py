"""The sizes of what is trained under data parallelism."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated

import typer

from .llama import check_rotary
from .shape import Shape, check_positive, size

SHARDS = ("none", "gradients", "parameters")


@dataclass(frozen=True)
class StackShape(Shape):
    """Training steps under data parallelism: a stack of linears, or a small Llama.

    ``layers`` linears of ``hidden`` by ``hidden`` features without biases, GELU between them, on ``tokens`` rows a
    rank; ``steps`` steps of SGD in a row, whose time is divided by their number.
    """

    case = "dp"
    passes = ("train",)
    dtypes = ("float32", "float64")
    slices = (None,)  # whole weights are the slices

    layers: Annotated[int, size("Layers: 16 linears, or 2 decoder layers, unless given.")] = 16
    hidden: Annotated[int, size("Features between the layers.")] = 1024
    tokens: Annotated[int, size("Tokens of each rank in a step.")] = 1024
    shard: Annotated[str, typer.Option(help=f"What is sharded. One of {', '.join(SHARDS)}.")] = "gradients"
    steps: Annotated[int, size("Steps in a row; times are those of one.")] = 4

    def check(self, ranks: int) -> None:
        """Raises ValueError for sizes below one and for an unknown sharding."""
        check_positive(self, [name for name, value in asdict(self).items() if not isinstance(value, str)])
        if self.shard not in SHARDS:
            raise ValueError(f"--shard {self.shard}: unknown; known: {', '.join(SHARDS)}")

    @property
    def parameters(self) -> int:
        """Their number."""
        return self.layers * self.hidden**2

    @property
    def _last(self) -> int:
        """Those of the last layer."""
        return self.hidden**2

    def ideal_elements(self, ranks: int, train: bool) -> int:
        """Gradients are scattered and parameters gathered once.

        Sharded parameters are gathered for backward again, but for those of the last layer, which are still there.
        """
        again = self.parameters - self._last if self.shard == "parameters" else 0
        return 2 * (self.parameters - self.parameters // ranks) + again - again // ranks

    def reduced(self, ranks: int) -> StackShape:
        """A small shape whose features the ranks do not divide."""
        return replace(self, layers=3, hidden=6 * ranks + 1, tokens=5, steps=min(self.steps, 3))

    def uneven(self, ranks: int) -> str | None:
        """None: whoever shards parameters pads them."""
        return None

    def refuses(self, peer: str) -> str | None:
        """FSDP shards in any case."""
        if peer == "fsdp2" and self.shard == "none":
            return "--peers fsdp2 shards the parameters or their gradients, not --shard none"
        return None


@dataclass(frozen=True)
class LlmShape(StackShape):
    """A small Llama of transformers, one sequence of ``tokens`` tokens a rank."""

    case = "dp_llm"
    package = "transformers"

    layers: Annotated[int, size("Layers: 16 linears, or 2 decoder layers, unless given.")] = 2
    heads: Annotated[int, size("Attention heads.")] = 16
    kv_heads: Annotated[int, size("Key and value heads.")] = 4
    ffn: Annotated[int, size("Hidden features of the MLP.")] = 2816
    vocab: Annotated[int, size("Vocabulary.")] = 512

    @property
    def seq(self) -> int:
        """Tokens of the sequence."""
        return self.tokens

    def check(self, ranks: int) -> None:
        """The same, and for heads that do not fit."""
        super().check(ranks)
        check_rotary(self.hidden, self.heads, self.kv_heads)
        if self.tokens < 2:
            raise ValueError(f"--tokens {self.tokens}: at least 2 are needed, since each predicts the next")

    @property
    def parameters(self) -> int:
        """Their number: embedding, head, layers and norms."""
        kv_features = self.hidden // self.heads * self.kv_heads
        layer = 2 * self.hidden * (self.hidden + kv_features) + 3 * self.hidden * self.ffn + 2 * self.hidden
        return 2 * self.vocab * self.hidden + self.layers * layer + self.hidden

    @property
    def _last(self) -> int:
        """Those of the head."""
        return self.vocab * self.hidden

    def reduced(self, ranks: int) -> LlmShape:
        """A small shape whose features the ranks do not divide."""
        sizes = {"hidden": 24, "heads": 6, "kv_heads": 3, "ffn": 6 * ranks + 1, "vocab": 12 * ranks + 1}
        return replace(self, layers=2, tokens=11, steps=min(self.steps, 3), **sizes)
