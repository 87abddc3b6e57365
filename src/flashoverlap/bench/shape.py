"""The sizes of each workload, and the bytes that it cannot do without."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from ..overlap import ATTENTIONS
from ..patterns import split_sizes


class Shape(Protocol):
    """The sizes of one workload: a frozen dataclass of plain numbers and words."""

    @property
    def case(self) -> str:
        """The workload's name."""
        ...

    @property
    def package(self) -> str | None:
        """The package beside torch whose modules the workload is made of."""
        ...

    def check(self, ranks: int) -> None:
        """Raises ValueError, with the option and its value, for sizes that mean nothing or cannot be shared out."""
        ...

    def ideal_elements(self, ranks: int, train: bool) -> int:
        """Elements that the busiest rank has to send, or to receive, whichever is more."""
        ...

    def reduced(self, ranks: int) -> Any:
        """A small shape of the same kind whose sizes the ranks do not divide."""
        ...

    def uneven(self, ranks: int) -> str | None:
        """The option, with its value, that the ranks do not divide; None where all parts are equal."""
        ...


@dataclass(frozen=True)
class MlpShape:
    """``seq`` rows of ``hidden`` features through ``ffn`` hidden features, plain (gelu) or gated (silu)."""

    seq: int = 4096
    hidden: int = 1024
    ffn: int = 4096
    gated: bool = False
    activation: str = "gelu"

    @property
    def case(self) -> str:
        """The workload's name."""
        return "mlp"

    @property
    def package(self) -> str | None:
        """None: the library's operators suffice."""
        return None

    def check(self, ranks: int) -> None:
        """Raises ValueError for sizes below one."""
        _check_positive(self, ("seq", "hidden", "ffn"))

    def ideal_elements(self, ranks: int, train: bool) -> int:
        """Forward a gather and a scatter of all rows; backward two gathers (dz, x again) and a scatter."""
        gathers, scatters = (3, 2) if train else (1, 1)
        return _busiest_rows(self.seq, ranks, gathers, scatters) * self.hidden

    def reduced(self, ranks: int) -> MlpShape:
        """A small shape whose rows and features the ranks do not divide."""
        return replace(self, seq=10 * ranks + 1, hidden=12, ffn=6 * ranks + 1)

    def uneven(self, ranks: int) -> str | None:
        """The first of the sharded sizes that the ranks do not divide."""
        return _first_uneven(self, ("seq", "ffn"), ranks)


@dataclass(frozen=True)
class BlockShape:
    """A Llama decoder layer: ``batch`` sequences of ``seq`` tokens, grouped-query attention and a gated MLP.

    ``attention``, of ATTENTIONS in overlap.py: whether the library cuts it by queries or leaves it to the model.
    """

    seq: int = 2048
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 4
    ffn: int = 2816
    batch: int = 1
    attention: str = "query_split"

    @property
    def case(self) -> str:
        """The workload's name."""
        return "block"

    @property
    def package(self) -> str | None:
        """The decoder layer's."""
        return "transformers"

    def check(self, ranks: int) -> None:
        """Raises ValueError for sizes below one and for heads that cannot be shared out."""
        _check_positive(self, [name for name, size in asdict(self).items() if not isinstance(size, str)])
        if self.attention not in ATTENTIONS:
            raise ValueError(f"--attention {self.attention}: unknown; known: {', '.join(ATTENTIONS)}")
        heads, kv_heads = f"--heads {self.heads}", f"--kv-heads {self.kv_heads}"
        if self.hidden % (2 * self.heads):
            raise ValueError(f"--hidden {self.hidden}: a multiple of 2 x {heads} is needed, for rotary positions")
        if self.heads % self.kv_heads:
            raise ValueError(f"{kv_heads}: a divisor of {heads} is needed")
        if self.seq % ranks:  # where nothing is moved, nobody knows how many rows the others have
            raise ValueError(f"--seq {self.seq}: a multiple of --ranks {ranks} is needed")
        if self.heads % ranks:
            raise ValueError(f"{heads}: a multiple of --ranks {ranks} is needed")
        if self.kv_heads % ranks and ranks % self.kv_heads:
            raise ValueError(f"{kv_heads}: a multiple or a divisor of --ranks {ranks} is needed")

    def ideal_elements(self, ranks: int, train: bool) -> int:
        """What an MLP moves, for the attention and for the MLP.

        Not counted, being small: the gradients of norms, and of key/value heads that ranks share.
        """
        gathers, scatters = (6, 4) if train else (2, 2)
        return _busiest_rows(self.seq, ranks, gathers, scatters) * self.batch * self.hidden

    def reduced(self, ranks: int) -> BlockShape:
        """A small shape whose rows and features the ranks do not divide; key/value heads are shared out alike."""
        heads, kv_heads = 2 * ranks, min(ranks, self.kv_heads)
        return replace(
            self, seq=10 * ranks + 1, hidden=4 * heads, heads=heads, kv_heads=kv_heads, ffn=6 * ranks + 1, batch=2
        )

    def uneven(self, ranks: int) -> str | None:
        """The first of the sharded sizes that the ranks do not divide."""
        return _first_uneven(self, ("seq", "kv_heads", "ffn"), ranks)


@dataclass(frozen=True)
class ModelShape(BlockShape):
    """A whole Llama: embedding, ``layers`` decoder layers, norm, and a head over ``vocab`` entries with its loss."""

    layers: int = 2
    vocab: int = 512

    @property
    def case(self) -> str:
        """The workload's name."""
        return "model"

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
        return _busiest_rows(self.seq, ranks, gathers, scatters) * self.batch * self.hidden

    def reduced(self, ranks: int) -> ModelShape:
        """A small shape whose rows, features and vocabulary the ranks do not divide."""
        return replace(super().reduced(ranks), layers=2, vocab=12 * ranks + 1)  # pyright: ignore[reportReturnType]

    def uneven(self, ranks: int) -> str | None:
        """The first of the sharded sizes that the ranks do not divide."""
        return _first_uneven(self, ("seq", "kv_heads", "ffn", "vocab"), ranks)


def _option(shape: Any, name: str) -> str:
    """A size as it was given on the command line."""
    return f"--{name.replace('_', '-')} {getattr(shape, name)}"


def _check_positive(shape: Any, names: Iterable[str]) -> None:
    for name in names:
        if getattr(shape, name) < 1:
            raise ValueError(f"{_option(shape, name)}: at least 1 is needed")


def _first_uneven(shape: Any, names: Iterable[str], ranks: int) -> str | None:
    return next((_option(shape, name) for name in names if getattr(shape, name) % ranks), None)


def _busiest_rows(rows: int, ranks: int, gathers: int, scatters: int) -> int:
    """Rows that the busiest rank sends, or receives, in gathers and scatters of all rows, whichever is more."""
    busiest = 0
    for own in split_sizes(rows, ranks):
        out, away = (ranks - 1) * own, rows - own
        busiest = max(busiest, gathers * out + scatters * away, gathers * away + scatters * out)
    return busiest


SHAPES: dict[str, type[MlpShape] | type[BlockShape]] = {
    "mlp": MlpShape,
    "block": BlockShape,
    "model": ModelShape,
}
