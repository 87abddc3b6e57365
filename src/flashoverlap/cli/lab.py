"""``flashoverlap lab``."""

from __future__ import annotations

from typing import Annotated

import typer

from ..lab import run_command
from .common import LinkRate, Nodes, Ranks, Uplink, refused


def lab(
    command: Annotated[list[str], typer.Argument(help="What each rank runs, after --.", metavar="-- COMMAND...")],
    ranks: Ranks = 2,
    link: LinkRate = "1gbit",
    nodes: Nodes = 1,
    uplink: Uplink = None,
) -> None:
    """Run a command once per rank, each in a network of its own behind a rate-limited link."""
    try:
        status = run_command(ranks, link, command, nodes=nodes, uplink=uplink)
    except ValueError as error:
        raise refused("lab", error) from None
    raise typer.Exit(status)
