"""The sizes of each workload, and the bytes that it cannot do without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..patterns import split_sizes


class Shape(Protocol):
    """The sizes of one workload: a frozen dataclass of plain numbers and words."""

    @property
    def case(self) -> str:
        """The workload's name."""
        ...

    def check(self) -> None:
        """Raises ValueError, with the option and its value, for sizes that mean nothing."""
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

    def check(self) -> None:
        """Raises ValueError for sizes below one."""
        for name in ("seq", "hidden", "ffn"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: at least 1 is needed")

    def ideal_elements(self, ranks: int, train: bool) -> int:
        """Forward a gather and a scatter of all rows; backward two gathers (dz, x again) and a scatter."""
        gathers, scatters = (3, 2) if train else (1, 1)
        busiest = 0
        for own in split_sizes(self.seq, ranks):
            out, away = (ranks - 1) * own, self.seq - own
            busiest = max(busiest, gathers * out + scatters * away, gathers * away + scatters * out)
        return busiest * self.hidden

    def reduced(self, ranks: int) -> MlpShape:
        """A small shape whose rows and features the ranks do not divide."""
        return replace(self, seq=10 * ranks + 1, hidden=12, ffn=6 * ranks + 1)

    def uneven(self, ranks: int) -> str | None:
        """The first of the sharded sizes that the ranks do not divide."""
        return next((f"--{n} {getattr(self, n)}" for n in ("seq", "ffn") if getattr(self, n) % ranks), None)


SHAPES: dict[str, type[MlpShape]] = {"mlp": MlpShape}
