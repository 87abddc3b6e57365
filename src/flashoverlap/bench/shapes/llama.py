"""The sizes of a Llama, and of one layer of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated

import typer

from ...overlap import ATTENTIONS
from .shape import Shape, busiest_rows, check_multiple, check_positive, first_uneven, size


@dataclass(frozen=True)
class BlockShape(Shape):
    """A Llama decoder layer of transformers under tensor and sequence parallelism.

    ``batch`` sequences of ``seq`` tokens, grouped-query attention and a gated MLP. ``attention``, of ATTENTIONS in
    overlap.py: whether the library cuts it by queries or leaves it to the model.
    """

    case = "block"
    package = "transformers"

    seq: Annotated[int, size("Tokens of a sequence.")] = 2048
    hidden: Annotated[int, size("Features between the layers.")] = 1024
    heads: Annotated[int, size("Attention heads.")] = 16
    kv_heads: Annotated[int, size("Key and value heads.")] = 4
    ffn: Annotated[int, size("Hidden features of the MLP.")] = 2816
    batch: Annotated[int, size("Sequences.")] = 1
    attention: Annotated[
        str, typer.Option(help=f"Cut by queries, or left to the model. One of {', '.join(ATTENTIONS)}.")
    ] = "query_split"

    def check(self, ranks: int) -> None:
        """Raises ValueError for sizes below one and for heads that cannot be shared out."""
        check_positive(self, [name for name, value in asdict(self).items() if not isinstance(value, str)])
        if self.attention not in ATTENTIONS:
            raise ValueError(f"--attention {self.attention}: unknown; known: {', '.join(ATTENTIONS)}")
        check_rotary(self.hidden, self.heads, self.kv_heads)
        check_multiple(self, ("seq", "heads"), ranks)  # where nothing is moved, nobody knows the others' rows
        if self.kv_heads % ranks and ranks % self.kv_heads:
            raise ValueError(f"--kv-heads {self.kv_heads}: a multiple or a divisor of --ranks {ranks} is needed")

    def ideal_elements(self, ranks: int, train: bool) -> int:
        """What an MLP moves, for the attention and for the MLP.

        Not counted, being small: the gradients of norms, and of key/value heads that ranks share.
        """
        gathers, scatters = (6, 4) if train else (2, 2)
        return busiest_rows(self.seq, ranks, gathers, scatters) * self.batch * self.hidden

    def reduced(self, ranks: int) -> BlockShape:
        """A small shape whose rows and features the ranks do not divide; key/value heads are shared out alike."""
        heads, kv_heads = 2 * ranks, min(ranks, self.kv_heads)
        return replace(
            self, seq=10 * ranks + 1, hidden=4 * heads, heads=heads, kv_heads=kv_heads, ffn=6 * ranks + 1, batch=2
        )

    def uneven(self, ranks: int) -> str | None:
        """The first of the sharded sizes that the ranks do not divide."""
        return first_uneven(self, ("seq", "kv_heads", "ffn"), ranks)


@dataclass(frozen=True)
class ModelShape(BlockShape):
    """A whole small Llama of transformers, from its tokens to its loss, and back.

    Embedding, ``layers`` decoder layers, norm, and a head over ``vocab`` entries with its loss.
    """

    case = "model"

    layers: Annotated[int, size("Decoder layers.")] = 2
    vocab: Annotated[int, size("Vocabulary.")] = 512

    def check(self, ranks: int) -> None:
        """The same, and for a vocabulary that leaves a rank without an entry."""
        super().check(ranks)
        if -(-self.vocab // ranks) * (ranks - 1) >= self.vocab > 0 and ranks > 1:
            raise ValueError(f"--vocab {self.vocab}: too few entries for --ranks {ranks}")

    def ideal_elements(self, ranks: int, train: bool) -> int:
        """That of the layers, a scatter behind the embedding and a gather before the head.

        Backward the embedding gathers its gradient; the head gathers its input again and scatters its gradient. What
        a loss over a sharded vocabulary exchanges, three numbers a token, is not counted either.
        """
        gathers, scatters = (6 * self.layers + 3, 4 * self.layers + 2) if train else (2 * self.layers + 1,) * 2
        return busiest_rows(self.seq, ranks, gathers, scatters) * self.batch * self.hidden

    def reduced(self, ranks: int) -> ModelShape:
        """A small shape whose rows, features and vocabulary the ranks do not divide."""
        return replace(super().reduced(ranks), layers=2, vocab=12 * ranks + 1)  # pyright: ignore[reportReturnType]

    def uneven(self, ranks: int) -> str | None:
        """The first of the sharded sizes that the ranks do not divide."""
        return first_uneven(self, ("seq", "kv_heads", "ffn", "vocab"), ranks)


def check_rotary(hidden: int, heads: int, kv_heads: int) -> None:
    """Raises ValueError for heads that cannot have rotary positions, or share keys and values."""
    if hidden % (2 * heads):
        raise ValueError(f"--hidden {hidden}: a multiple of 2 x --heads {heads} is needed, for rotary positions")
    if heads % kv_heads:
        raise ValueError(f"--kv-heads {kv_heads}: a divisor of --heads {heads} is needed")
