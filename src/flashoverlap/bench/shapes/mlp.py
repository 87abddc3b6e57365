"""The sizes of the MLP."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from .shape import Shape, busiest_rows, check_positive, first_uneven, size


@dataclass(frozen=True)
class MlpShape(Shape):
    """An MLP under tensor and sequence parallelism.

    ``seq`` rows of ``hidden`` features through ``ffn`` hidden features, plain (gelu) or gated (silu).
    """

    case = "mlp"

    seq: Annotated[int, size("Rows of x in all.")] = 4096
    hidden: Annotated[int, size("Features of x.")] = 1024
    ffn: Annotated[int, size("Hidden features.")] = 4096
    gated: Annotated[bool, typer.Option(help="silu(gate(x)) * up(x) in place of gelu(up(x)).")] = False

    @property
    def activation(self) -> str:
        """Its name."""
        return "silu" if self.gated else "gelu"

    def check(self, ranks: int) -> None:
        """Raises ValueError for sizes below one."""
        check_positive(self, ("seq", "hidden", "ffn"))

    def ideal_elements(self, ranks: int, train: bool) -> int:
        """Forward a gather and a scatter of all rows; backward two gathers (dz, x again) and a scatter."""
        gathers, scatters = (3, 2) if train else (1, 1)
        return busiest_rows(self.seq, ranks, gathers, scatters) * self.hidden

    def reduced(self, ranks: int) -> MlpShape:
        """A small shape whose rows and features the ranks do not divide."""
        return replace(self, seq=10 * ranks + 1, hidden=12, ffn=6 * ranks + 1)

    def uneven(self, ranks: int) -> str | None:
        """The first of the sharded sizes that the ranks do not divide."""
        return first_uneven(self, ("seq", "ffn"), ranks)
