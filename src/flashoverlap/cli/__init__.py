"""The command line, a file a command. What needs torch is imported late, for speed.

To add a command: a file beside these with its function, and a line below.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from . import bench
from .calibrate import calibrate
from .common import HELP, SETTINGS, OneLineErrors
from .generate import generate
from .lab import lab
from .plan import plan
from .train import train

app = typer.Typer(cls=OneLineErrors, pretty_exceptions_enable=False, context_settings=HELP, **SETTINGS)
app.add_typer(bench.app, name="bench")
app.command()(calibrate)
app.command()(train)
app.command()(generate)
app.command()(plan)
app.command(context_settings={"allow_interspersed_args": False})(lab)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashoverlap {version('flashoverlap')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Hide the communication of distributed training and inference behind its computation, and prove it."""
