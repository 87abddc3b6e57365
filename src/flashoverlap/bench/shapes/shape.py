"""What the sizes of every workload say of themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import typer

from ...arguments import whole
from ...patterns import split_sizes


def size(text: str) -> Any:
    """An option that is a size, or several with commas between, which are run one after another."""

    def read(given: str | int) -> int | tuple[int, ...]:
        if isinstance(given, int) or "," not in given:
            return whole(given)
        return tuple(whole(one) for one in given.split(","))

    return typer.Option(help=text, metavar="N[,N...]", parser=read)


@dataclass(frozen=True)
class Shape:
    """The sizes of one workload; each is a frozen dataclass of plain numbers and words.

    Attributes:
        case: the workload's name.
        package: the package beside torch whose modules the workload is made of, or None.
        passes: what of it can be run: "forward", "train".
        dtypes: that it can be run in; None for all.
        slices: numbers of slices that mode slice is run with; None where it has no such number.
        variants: rows beside the modes, which run mode flash in another way.
    """

    case: ClassVar[str]
    package: ClassVar[str | None] = None
    passes: ClassVar[tuple[str, ...]] = ("forward", "train")
    dtypes: ClassVar[tuple[str, ...] | None] = None
    slices: ClassVar[tuple[int | None, ...]] = (2, 4, 8)

    @property
    def variants(self) -> tuple[str, ...]:
        """None, unless a shape says otherwise."""
        return ()

    def most_slices(self, ranks: int) -> int | None:
        """How many slices there can be on so many ranks; None where a call knows best."""
        return None

    def slices_on(self, ranks: int) -> tuple[int | None, ...]:
        """``slices``, those beyond the most counting as that many."""
        most = self.most_slices(ranks)
        if most is None:
            return self.slices
        return tuple(dict.fromkeys(min(count, most) for count in self.slices if count is not None))

    def check(self, ranks: int) -> None:
        """Raises ValueError, with the option and its value, for sizes that mean nothing or cannot be shared out."""
        raise NotImplementedError

    def ideal_elements(self, ranks: int, train: bool) -> int:
        """Elements that the busiest rank has to send, or to receive, whichever is more."""
        raise NotImplementedError

    def reduced(self, ranks: int) -> Any:
        """A small shape of the same kind whose sizes the ranks do not divide."""
        raise NotImplementedError

    def uneven(self, ranks: int) -> str | None:
        """The option, with its value, that the ranks do not divide; None where all parts are equal."""
        raise NotImplementedError

    def refuses(self, peer: str) -> str | None:
        """Why a peer that can run this workload cannot run it at these sizes; None where it can."""
        return None


def option(shape: Any, name: str) -> str:
    """A size as it was given on the command line."""
    return f"--{name.replace('_', '-')} {getattr(shape, name)}"


def check_positive(shape: Any, names: Iterable[str]) -> None:
    """Raises ValueError for sizes below one."""
    for name in names:
        if getattr(shape, name) < 1:
            raise ValueError(f"{option(shape, name)}: at least 1 is needed")


def check_multiple(shape: Any, names: Iterable[str], ranks: int) -> None:
    """Raises ValueError for sizes that the ranks do not divide."""
    for name in names:
        if getattr(shape, name) % ranks:
            raise ValueError(f"{option(shape, name)}: a multiple of --ranks {ranks} is needed")


def first_uneven(shape: Any, names: Iterable[str], ranks: int) -> str | None:
    """The first of these options, with its value, that the ranks do not divide."""
    return next((option(shape, name) for name in names if getattr(shape, name) % ranks), None)


def busiest_rows(rows: int, ranks: int, gathers: int, scatters: int) -> int:
    """Rows that the busiest rank sends, or receives, in gathers and scatters of all rows, whichever is more."""
    busiest = 0
    for own in split_sizes(rows, ranks):
        out, away = (ranks - 1) * own, rows - own
        busiest = max(busiest, gathers * out + scatters * away, gathers * away + scatters * out)
    return busiest
