"""``flashoverlap train``: the program of ``examples/train.py``, in a lab."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import replace
from typing import Annotated, Any

import typer

from ..arguments import whole
from ..lab import Lab, LabError
from ..train.options import Options, taking_options
from ..train.refusal import DISAGREE, REFUSED
from .common import LinkRate, refused

_ENV = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # inside a lab no address has a name, which is no news


_Ranks = Annotated[
    int | None,
    typer.Option(parser=whole, metavar="N", help="Ranks; as many as --dp, --up and --tp need, or 2, unless given."),
]


@taking_options
def train(ranks: _Ranks = None, link: LinkRate = "1gbit", **chosen: Any) -> None:
    """Train a language model in parallel, or compare how modes train it."""
    from ..train.preflight import check, check_model  # late, as whatever takes a while to load

    try:
        options = Options(**chosen)
        ranks = options.least_ranks if ranks is None else ranks
        lab = Lab(ranks, link)
        options.degrees(ranks)
        check(options)
        if options.model != "small" or options.resume:
            check_model(options)
    except ValueError as error:
        raise refused("train", error) from None
    if sys.stdout.isatty():
        options = replace(options, terminal=os.ttyname(sys.stdout.fileno()))
    command = [sys.executable, "-m", "flashoverlap.train.program", *options.arguments()]
    unread = io.StringIO()  # an error repeats what was said last
    try:
        with lab:
            lab.run(command, env=_ENV, stderr=unread, prefix=False)
    except LabError as error:
        raise _failed(error) from None
    for warning in dict.fromkeys(line.partition("Warning: ")[2] for line in unread.getvalue().splitlines()):
        if warning:
            typer.echo(f"flashoverlap train: {warning}", err=True)


def _failed(error: LabError) -> typer.Exit:
    """Says what went wrong, unless the ranks have said it already; raise what it returns."""
    if error.exit_code == DISAGREE:
        return typer.Exit(1)
    last = error.tail.splitlines()[-1:]
    if error.exit_code == REFUSED and last and last[0].startswith("flashoverlap train: "):
        typer.echo(last[0], err=True)
        return typer.Exit(2)
    typer.echo(f"flashoverlap train: {error}", err=True)
    return typer.Exit(1)
