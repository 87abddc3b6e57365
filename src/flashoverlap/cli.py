"""The command line: ``flashoverlap lab`` and ``flashoverlap bench``. What needs torch is imported late, for speed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .bench.options import DTYPES, MODES, PASSES, PATTERNS, PEERS, Options
from .bench.shape import MlpShape, Shape
from .lab import LabError, run_command


class _OneLineErrors(TyperGroup):
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


_SETTINGS: dict[str, Any] = {"add_completion": False, "no_args_is_help": True, "rich_markup_mode": None}
_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(cls=_OneLineErrors, pretty_exceptions_enable=False, context_settings=_HELP, **_SETTINGS)
bench = typer.Typer(help="Measure a workload in all modes, over links whose bytes take time.", **_SETTINGS)
app.add_typer(bench, name="bench")


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


def _whole(text: str | int) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


_Ranks = Annotated[int, typer.Option(parser=_whole, metavar="N", help="Number of ranks.")]
_Link = Annotated[
    str, typer.Option(help="Rate of each rank's link, as in 400mbit or 2.5gbit; none for plain loopback.")
]


@app.command(context_settings={"allow_interspersed_args": False})
def lab(
    command: Annotated[list[str], typer.Argument(help="What each rank runs, after --.", metavar="-- COMMAND...")],
    ranks: _Ranks = 2,
    link: _Link = "1gbit",
) -> None:
    """Run a command once per rank, each in a network of its own behind a rate-limited link."""
    try:
        status = run_command(ranks, link, command)
    except ValueError as error:
        raise _refused("lab", error) from None
    raise typer.Exit(status)


@bench.callback()
def _bench() -> None:
    """Measure a workload in all modes, over links whose bytes take time."""


def _one_of(names: Sequence[str]) -> str:
    return "One of " + ", ".join(names) + "."


def _several_of(names: Sequence[str]) -> str:
    return "Some of " + ",".join(names) + "."


_Modes = Annotated[str, typer.Option(help=f"{_several_of(MODES)} compute and off are always run.")]
_Peers = Annotated[str, typer.Option(help=f"{_several_of(PEERS)} None unless given.")]
_Pass = Annotated[str, typer.Option("--pass", help=_one_of(PASSES))]
_DType = Annotated[str, typer.Option(help=_one_of(DTYPES))]
_Repeats = Annotated[int, typer.Option(parser=_whole, metavar="N", help="Rounds that are timed.")]
_Splits = Annotated[str, typer.Option(help="Splits of mode flash: auto, a number, or best (of 1, 2, 4, 8).")]
_Pattern = Annotated[str, typer.Option(help=f"Of modes flash and auto. {_one_of(PATTERNS)}")]
_Json = Annotated[Path | None, typer.Option(help="File to write the result to.")]
_Trace = Annotated[Path | None, typer.Option(help="File for a trace of one further run of flash, for Perfetto.")]


@bench.command()
def mlp(
    seq: Annotated[int, typer.Option(parser=_whole, metavar="N", help="Rows of x in all.")] = 4096,
    hidden: Annotated[int, typer.Option(parser=_whole, metavar="N", help="Features of x.")] = 1024,
    ffn: Annotated[int, typer.Option(parser=_whole, metavar="N", help="Hidden features.")] = 4096,
    gated: Annotated[bool, typer.Option(help="silu(gate(x)) * up(x) in place of gelu(up(x)).")] = False,
    ranks: _Ranks = 2,
    link: _Link = "1gbit",
    modes: _Modes = "off,slice,flash",
    peers: _Peers = "",
    phase: _Pass = "forward",
    dtype: _DType = "float32",
    repeats: _Repeats = 7,
    splits: _Splits = "auto",
    pattern: _Pattern = "direct",
    json: _Json = None,
    trace: _Trace = None,
) -> None:
    """Measure an MLP under tensor and sequence parallelism."""
    shape = MlpShape(seq, hidden, ffn, gated, "silu" if gated else "gelu")
    _run(
        shape, json, trace, ranks=ranks, link=link, modes=_names(modes), peers=_names(peers), phase=phase,
        dtype=dtype, repeats=repeats, splits=splits, pattern=pattern,
    )  # fmt: skip


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _refused(command: str, error: Exception) -> typer.Exit:
    typer.echo(f"flashoverlap {command}: {error}", err=True)
    return typer.Exit(2)


def _check_writable(file: Path) -> None:
    """Raises ValueError for a file that could not be written once all is measured."""
    if not file.parent.is_dir():
        raise ValueError(f"{file}: there is no directory {file.parent}")
    if file.is_dir():
        raise ValueError(f"{file} is a directory")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"{file} cannot be written")


def _run(shape: Shape, json: Path | None, trace: Path | None, **chosen: Any) -> None:
    """Runs a benchmark, prints its table, writes its files, and ends with its status."""
    from .bench.run import run

    command = f"bench {shape.case}"
    try:
        options = Options(shape, trace=trace is not None, **chosen)
        files = [file for file in (json, trace) if file is not None]
        if len({file.absolute() for file in files}) < len(files):
            raise ValueError(f"--json and --trace both name {json}")
        for file in files:
            _check_writable(file)
    except ValueError as error:
        raise _refused(command, error) from None
    try:
        outcome = run(options)
    except LabError as error:
        typer.echo(f"flashoverlap {command}: {error}", err=True)
        raise typer.Exit(1) from None
    _show(outcome, json, trace)
    for complaint in outcome.complaints:
        typer.echo(f"flashoverlap {command}: wrong values: {complaint}", err=True)
    raise typer.Exit(1 if outcome.complaints else 0)


def _show(outcome: Any, json: Path | None, trace: Path | None) -> None:
    from json import dumps

    from rich.console import Console

    from .bench.table import table

    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table(outcome.result))
    for note in outcome.notes:
        console.print(note, markup=False)
    if json is not None:
        json.write_text(dumps(outcome.result, indent=1) + "\n", encoding="utf-8")
    if trace is not None and outcome.trace is not None:
        outcome.trace.save(trace)
