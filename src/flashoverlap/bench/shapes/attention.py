"""The sizes of an attention: that of query-split attention, and that of Ulysses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from ...patterns import split_sizes
from .shape import Shape, busiest_rows, check_multiple, check_positive, first_uneven, size

COMPARED = ("row",)


@dataclass(frozen=True)
class UlyssesShape(Shape):
    """Ulysses attention: own rows in and out, own heads between two all-to-alls.

    ``batch`` sequences of ``seq`` tokens with ``hidden`` features in ``heads`` heads.
    """

    case = "ulysses"

    seq: Annotated[int, size("Tokens of a sequence.")] = 4096
    hidden: Annotated[int, size("Features of all heads together.")] = 1024
    heads: Annotated[int, size("Attention heads.")] = 16
    kv_heads: Annotated[int, size("Key and value heads.")] = 16
    batch: Annotated[int, size("Sequences.")] = 1
    causal: Annotated[bool, typer.Option(help="Each token reads those before it, and itself.")] = False

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.hidden // self.heads

    def most_slices(self, ranks: int) -> int | None:
        """The heads that a rank has."""
        return self.heads // self.kv_heads * max(split_sizes(self.kv_heads, ranks))

    def check(self, ranks: int) -> None:
        """Raises ValueError for sizes below one and for heads or rows that cannot be shared out."""
        self._check_heads()
        check_multiple(self, ("seq", "heads", "kv_heads"), ranks)  # where nothing is moved, nobody knows the others'

    def _check_heads(self) -> None:
        check_positive(self, ("seq", "hidden", "heads", "kv_heads", "batch"))
        if self.hidden % self.heads:
            raise ValueError(f"--hidden {self.hidden}: a multiple of --heads {self.heads} is needed")
        if self.heads % self.kv_heads:
            raise ValueError(f"--kv-heads {self.kv_heads}: a divisor of --heads {self.heads} is needed")

    def ideal_elements(self, ranks: int, train: bool) -> int:
        """Forward own rows of others' heads of q, k and v, and others' rows of own heads; backward both the other way.

        The output projection's input is not exchanged again.
        """
        projected = (self.heads + 2 * self.kv_heads) * self.head_dim // ranks
        attended = self.hidden // ranks
        busiest = 0
        for own in split_sizes(self.seq, ranks):
            out, away = (ranks - 1) * own, self.seq - own
            sent, received = projected * out + attended * away, projected * away + attended * out
            busiest = max(busiest, sent + received if train else max(sent, received))
        return busiest * self.batch

    def reduced(self, ranks: int) -> UlyssesShape:
        """A small shape whose rows and heads the ranks do not divide."""
        kv_heads = ranks + 1
        return replace(self, seq=10 * ranks + 1, hidden=8 * kv_heads, heads=2 * kv_heads, kv_heads=kv_heads, batch=2)

    def uneven(self, ranks: int) -> str | None:
        """None: rows and heads are shared out evenly."""
        return None


@dataclass(frozen=True)
class AttentionShape(UlyssesShape):
    """Attention of own heads, output projection and the scatter of its rows, under tensor and sequence parallelism.

    ``batch`` sequences of ``seq`` tokens with ``hidden`` features in ``heads`` heads. With ``compare`` "row" the
    scatter is also hidden behind the projection alone, after all of attention.
    """

    case = "attention"

    compare: Annotated[
        str,
        typer.Option(help="row: also measure attention as a whole, and only then the overlapped row-parallel linear."),
    ] = ""

    @property
    def variants(self) -> tuple[str, ...]:
        """Those that are compared."""
        return (self.compare,) if self.compare else ()

    def most_slices(self, ranks: int) -> int | None:
        """The sequences, where there are several; of one, rows are sliced."""
        return self.batch if self.batch > 1 else None

    def check(self, ranks: int) -> None:
        """Raises ValueError for sizes below one and for too few heads."""
        self._check_heads()
        if self.compare and self.compare not in COMPARED:
            raise ValueError(f"--compare {self.compare}: unknown; known: {', '.join(COMPARED)}")
        if self.kv_heads < ranks:
            raise ValueError(f"--kv-heads {self.kv_heads}: at least one for each of --ranks {ranks} is needed")

    def ideal_elements(self, ranks: int, train: bool) -> int:
        """Forward a scatter of all rows, backward a gather."""
        return busiest_rows(self.seq, ranks, int(train), 1) * self.batch * self.hidden

    def reduced(self, ranks: int) -> UlyssesShape:
        """The same; one sequence stays one, since more of them are cut in another way."""
        return replace(super().reduced(ranks), batch=min(self.batch, 3))

    def uneven(self, ranks: int) -> str | None:
        """The first of the sharded sizes that the ranks do not divide."""
        return first_uneven(self, ("seq", "kv_heads"), ranks)
