"""What the commands share: their errors in one line, and options that several of them take."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..arguments import whole


class OneLineErrors(TyperGroup):
    """Says what is wrong with the arguments in one line, and ends with the status that fits."""

    def main(self, *args: Any, **named: Any) -> Any:
        try:
            status = super().main(*args, **{**named, "standalone_mode": False})
        except typer.Abort:
            status = 130
        except Exception as error:
            message = getattr(error, "format_message", None)  # a usage error, whichever click this typer brings
            if message is None:
                raise
            where = getattr(getattr(error, "ctx", None), "command_path", "flashoverlap")
            text = message()  # the whole help, where no command was given
            typer.echo(text if text.startswith("Usage:") else f"{where}: {' '.join(text.split())}", err=True)
            status = getattr(error, "exit_code", 2)
        sys.exit(status if isinstance(status, int) else 0)


SETTINGS: dict[str, Any] = {"add_completion": False, "no_args_is_help": True, "rich_markup_mode": None}
HELP = {"help_option_names": ["-h", "--help"]}


Ranks = Annotated[int, typer.Option(parser=whole, metavar="N", help="Number of ranks.")]
LinkRate = Annotated[
    str,
    typer.Option(
        help="Rate of each rank's link, as in 400mbit or 2.5gbit; none for plain loopback. "
        "With 1gbit,200mbit@5s it changes 5 s after the start."
    ),
]
Nodes = Annotated[
    int, typer.Option(parser=whole, metavar="N", help="Nodes of the ranks; those of one node share its uplink.")
]
Uplink = Annotated[
    str | None, typer.Option(help="Rate of each node's link to the others, as for --link; goes with --nodes.")
]
Json = Annotated[Path | None, typer.Option(help="File to write the result to.")]


def one_of(names: Sequence[str]) -> str:
    """Help for an option that takes one of these."""
    return "One of " + ", ".join(names) + "."


def several_of(names: Sequence[str]) -> str:
    """Help for an option that takes some of these, with commas between."""
    return "Some of " + ",".join(names) + "."


def names(text: str) -> tuple[str, ...]:
    """Words between commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def refused(command: str, error: Exception) -> typer.Exit:
    """Says in one line what was refused; raise what it returns."""
    typer.echo(f"flashoverlap {command}: {error}", err=True)
    return typer.Exit(2)
