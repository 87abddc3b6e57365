"""``flashoverlap generate``."""

from __future__ import annotations

import os
import sys
from json import dumps
from typing import Annotated, Any

import typer

from ..arguments import check_writable, whole
from ..generate.options import DTYPES, MODES, Options, Sampling
from ..lab import LabError
from .common import Json, LinkRate, Ranks, one_of, refused

_Checkpoint = Annotated[
    str, typer.Option(help="Folder of a model: Hugging Face format with safetensors, or one that train wrote.")
]
_Tokens = Annotated[int, typer.Option(parser=whole, metavar="N", help="Tokens to generate at most.")]
_TopK = Annotated[
    int | None, typer.Option(parser=whole, metavar="N", help="Draw among so many most likely tokens only.")
]
_TopP = Annotated[float, typer.Option(help="Draw among the most likely tokens of this probability together only.")]


def generate(
    checkpoint: _Checkpoint,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    ranks: Ranks = 2,
    link: LinkRate = "none",
    tokens: _Tokens = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token; above, tokens are drawn.")] = 0.0,
    top_k: _TopK = None,
    top_p: _TopP = 1.0,
    seed: Annotated[int, typer.Option(parser=whole, metavar="N", help="Of the draws.")] = 0,
    dtype: Annotated[str, typer.Option(help=f"Of the parameters. {one_of(DTYPES)}")] = "float32",
    overlap: Annotated[str, typer.Option(help=f"How communication is hidden. {one_of(MODES)}")] = "auto",
    json: Json = None,
) -> None:
    """Continue a prompt with a language model, tensor-parallel over the ranks."""
    from ..generate.run import prepare, run

    try:
        sampling = Sampling(temperature, top_k, top_p, seed)
        prepared = prepare(Options(checkpoint, prompt, ranks, link, tokens, sampling, dtype, overlap))
        if json is not None:
            check_writable(json)
        outcome = run(prepared, _show)
    except ValueError as error:
        raise refused("generate", error) from None
    except LabError as error:
        typer.echo(f"flashoverlap generate: {error}", err=True)
        raise typer.Exit(1) from None
    except BrokenPipeError:  # nobody reads on, as under head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    typer.echo()
    if json is not None:
        json.write_text(dumps(outcome.result, indent=1) + "\n", encoding="utf-8")
    _tell(outcome)


def _show(piece: str) -> None:
    """Text, without what a terminal would take for a command."""
    typer.echo("".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in piece), nl=False)


def _tell(outcome: Any) -> None:
    """What it cost, on standard error: standard output is the text alone."""
    from rich.console import Console

    from ..generate.table import modes, speed

    for line in speed(outcome):
        typer.echo(line, err=True)
    table = modes(outcome)
    if table is not None:
        Console(stderr=True, width=None if sys.stderr.isatty() else 180).print(table)
