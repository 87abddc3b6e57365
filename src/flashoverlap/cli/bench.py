"""``flashoverlap bench``: a command a workload, whose options are its sizes and those that all benchmarks have."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..arguments import check_writable, taking
from ..bench.options import Options
from ..bench.shapes import SHAPES, Shape
from ..lab import LabError
from .common import SETTINGS, Json, one_of, refused

app = typer.Typer(help="Measure a workload in all modes, over links whose bytes take time.", **SETTINGS)

_Trace = Annotated[Path | None, typer.Option(help="File for a trace of one further run of flash, for Perfetto.")]
_DATA_PARALLEL = {"stack": "dp", "llm": "dp_llm"}
_Case = Annotated[str, typer.Option(help=one_of(tuple(_DATA_PARALLEL)))]


@app.callback()
def _bench() -> None:
    """Measure a workload in all modes, over links whose bytes take time."""


def _measuring(case: str) -> Callable[..., Any]:
    """The command of a workload."""

    @taking(SHAPES[case], Options)
    def command(json: Json = None, trace: _Trace = None, **chosen: Any) -> None:
        _run(f"bench {case}", SHAPES[case], json, trace, chosen)

    return command


@taking(*map(SHAPES.__getitem__, _DATA_PARALLEL.values()), Options, without=("phase",))
def _measuring_data_parallel(case: _Case = "stack", json: Json = None, trace: _Trace = None, **chosen: Any) -> None:
    if case not in _DATA_PARALLEL:
        raise refused("bench dp", ValueError(f"--case {case}: unknown; known: {', '.join(_DATA_PARALLEL)}"))
    _run("bench dp", SHAPES[_DATA_PARALLEL[case]], json, trace, {**chosen, "phase": "train"})


for _name, _shape in SHAPES.items():
    _command = _measuring_data_parallel if _name == "dp" else _measuring(_name)
    if _name != "dp_llm":
        app.command(_name, help=(_shape.__doc__ or "").partition("\n")[0])(_command)


def _run(command: str, shape: type[Shape], json: Path | None, trace: Path | None, chosen: Mapping[str, Any]) -> None:
    """Runs a benchmark, or several of several sizes; prints tables, writes files, and ends with the status of all."""
    from ..bench.run import run

    try:
        swept, several = _several(shape, chosen, trace)
        files = [file for file in (json, trace) if file is not None]
        if len({file.absolute() for file in files}) < len(files):
            raise ValueError(f"--json and --trace both name {json}")
        for file in files:
            check_writable(file)
    except ValueError as error:
        raise refused(command, error) from None
    results, complaints = [], []
    for options in several:
        try:
            outcome = run(options)
        except LabError as error:
            typer.echo(f"flashoverlap {command}: {error}", err=True)
            raise typer.Exit(1) from None
        _show(outcome, trace)
        results.append(outcome.result)
        complaints += outcome.complaints
    _close(results, swept, json)
    for complaint in complaints:
        typer.echo(f"flashoverlap {command}: wrong values: {complaint}", err=True)
    raise typer.Exit(1 if complaints else 0)


def _several(shape: type[Shape], chosen: Mapping[str, Any], trace: Path | None) -> tuple[str | None, list[Options]]:
    """The size that has several values, or None, and the options of each run; ValueError for what makes no sense."""
    sizes = {each.name: chosen[each.name] for each in fields(shape) if chosen.get(each.name) is not None}
    common = {each.name: chosen[each.name] for each in fields(Options) if each.name in chosen}
    for other in SHAPES.values():
        for each in fields(other):
            name, given = each.name, chosen.get(each.name)
            if issubclass(other, shape) and name not in sizes and given not in (None, each.default):
                raise ValueError(f"--{name.replace('_', '-')} {given}: means nothing with this --case")
    swept = [name for name, value in sizes.items() if isinstance(value, tuple)]
    if len(swept) > 1:
        raise ValueError(f"--{swept[0]} and --{swept[1]}: one size at a time can have several values")
    if swept and trace is not None:
        raise ValueError(f"--trace draws one run, and --{swept[0]} has several values")
    alike = [{**sizes, swept[0]: value} for value in sizes[swept[0]]] if swept else [sizes]
    made = [Options(shape(**each), trace=trace is not None, **common) for each in alike]
    return (swept[0] if swept else None), made


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200)


def _show(outcome: Any, trace: Path | None) -> None:
    """Prints what one benchmark gave, and saves its trace."""
    from ..bench.table import table

    console = _console()
    console.print(table(outcome.result))
    for note in outcome.notes:
        console.print(note, markup=False)
    if trace is not None and outcome.trace is not None:
        outcome.trace.save(trace)


def _close(results: list[dict[str, Any]], swept: str | None, json: Path | None) -> None:
    """Prints several results side by side, and writes the file of all."""
    from json import dumps

    from ..bench.table import sweep_table

    if swept is not None:
        _console().print(sweep_table(swept, results))
    if json is not None:
        content = results[0] if swept is None else {"schema": 1, "swept": swept, "results": results}
        json.write_text(dumps(content, indent=1) + "\n", encoding="utf-8")
