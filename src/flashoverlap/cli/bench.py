"""``flashoverlap bench``: a command a workload."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..arguments import check_writable, whole
from ..bench.options import DTYPES, MODES, PASSES, PATTERNS, PEERS, Options
from ..bench.shape import BlockShape, MlpShape, ModelShape, Shape
from ..lab import LabError
from ..overlap import ATTENTIONS
from .common import SETTINGS, Json, LinkRate, Ranks, names, one_of, refused, several_of

app = typer.Typer(help="Measure a workload in all modes, over links whose bytes take time.", **SETTINGS)


@app.callback()
def _bench() -> None:
    """Measure a workload in all modes, over links whose bytes take time."""


_Modes = Annotated[str, typer.Option(help=f"{several_of(MODES)} compute and off are always run.")]
_Peers = Annotated[str, typer.Option(help=f"{several_of(tuple(PEERS))} None unless given.")]
_Pass = Annotated[str, typer.Option("--pass", help=one_of(PASSES))]
_DType = Annotated[str, typer.Option(help=one_of(DTYPES))]
_Repeats = Annotated[int, typer.Option(parser=whole, metavar="N", help="Rounds that are timed.")]
_Splits = Annotated[str, typer.Option(help="Splits of mode flash: auto, a number, or best (of 1, 2, 4, 8).")]
_Pattern = Annotated[str, typer.Option(help=f"Of modes flash and auto. {one_of(PATTERNS)}")]
_Seq = Annotated[int, typer.Option(parser=whole, metavar="N", help="Tokens of a sequence.")]
_Hidden = Annotated[int, typer.Option(parser=whole, metavar="N", help="Features between the layers.")]
_Heads = Annotated[int, typer.Option(parser=whole, metavar="N", help="Attention heads.")]
_KvHeads = Annotated[int, typer.Option(parser=whole, metavar="N", help="Key and value heads.")]
_Ffn = Annotated[int, typer.Option(parser=whole, metavar="N", help="Hidden features of the MLP.")]
_Attention = Annotated[str, typer.Option(help=f"Cut by queries, or left to the model. {one_of(ATTENTIONS)}")]
_Batch = Annotated[int, typer.Option(parser=whole, metavar="N", help="Sequences.")]
_Trace = Annotated[Path | None, typer.Option(help="File for a trace of one further run of flash, for Perfetto.")]


@app.command()
def mlp(
    seq: Annotated[int, typer.Option(parser=whole, metavar="N", help="Rows of x in all.")] = 4096,
    hidden: Annotated[int, typer.Option(parser=whole, metavar="N", help="Features of x.")] = 1024,
    ffn: Annotated[int, typer.Option(parser=whole, metavar="N", help="Hidden features.")] = 4096,
    gated: Annotated[bool, typer.Option(help="silu(gate(x)) * up(x) in place of gelu(up(x)).")] = False,
    ranks: Ranks = 2,
    link: LinkRate = "1gbit",
    modes: _Modes = "off,slice,flash",
    peers: _Peers = "",
    phase: _Pass = "forward",
    dtype: _DType = "float32",
    repeats: _Repeats = 7,
    splits: _Splits = "auto",
    pattern: _Pattern = "direct",
    json: Json = None,
    trace: _Trace = None,
) -> None:
    """Measure an MLP under tensor and sequence parallelism."""
    shape = MlpShape(seq, hidden, ffn, gated, "silu" if gated else "gelu")
    _run(
        shape, json, trace, ranks=ranks, link=link, modes=names(modes), peers=names(peers), phase=phase,
        dtype=dtype, repeats=repeats, splits=splits, pattern=pattern,
    )  # fmt: skip


@app.command()
def block(
    seq: _Seq = BlockShape.seq,
    hidden: _Hidden = BlockShape.hidden,
    heads: _Heads = BlockShape.heads,
    kv_heads: _KvHeads = BlockShape.kv_heads,
    ffn: _Ffn = BlockShape.ffn,
    batch: _Batch = BlockShape.batch,
    attention: _Attention = BlockShape.attention,
    ranks: Ranks = 2,
    link: LinkRate = "1gbit",
    modes: _Modes = "off,slice,flash",
    peers: _Peers = "",
    phase: _Pass = "forward",
    dtype: _DType = "float32",
    repeats: _Repeats = 7,
    splits: _Splits = "auto",
    pattern: _Pattern = "direct",
    json: Json = None,
    trace: _Trace = None,
) -> None:
    """Measure a Llama decoder layer of transformers under tensor and sequence parallelism."""
    shape = BlockShape(seq, hidden, heads, kv_heads, ffn, batch, attention)
    _run(
        shape, json, trace, ranks=ranks, link=link, modes=names(modes), peers=names(peers), phase=phase,
        dtype=dtype, repeats=repeats, splits=splits, pattern=pattern,
    )  # fmt: skip


@app.command()
def model(
    seq: _Seq = ModelShape.seq,
    hidden: _Hidden = ModelShape.hidden,
    heads: _Heads = ModelShape.heads,
    kv_heads: _KvHeads = ModelShape.kv_heads,
    ffn: _Ffn = ModelShape.ffn,
    batch: _Batch = ModelShape.batch,
    attention: _Attention = ModelShape.attention,
    layers: Annotated[int, typer.Option(parser=whole, metavar="N", help="Decoder layers.")] = ModelShape.layers,
    vocab: Annotated[int, typer.Option(parser=whole, metavar="N", help="Vocabulary.")] = ModelShape.vocab,
    ranks: Ranks = 2,
    link: LinkRate = "1gbit",
    modes: _Modes = "off,slice,flash",
    peers: _Peers = "",
    phase: _Pass = "forward",
    dtype: _DType = "float32",
    repeats: _Repeats = 7,
    splits: _Splits = "auto",
    pattern: _Pattern = "direct",
    json: Json = None,
    trace: _Trace = None,
) -> None:
    """Measure a whole small Llama of transformers, from its tokens to its loss, and back."""
    shape = ModelShape(seq, hidden, heads, kv_heads, ffn, batch, attention, layers, vocab)
    _run(
        shape, json, trace, ranks=ranks, link=link, modes=names(modes), peers=names(peers), phase=phase,
        dtype=dtype, repeats=repeats, splits=splits, pattern=pattern,
    )  # fmt: skip


def _run(shape: Shape, json: Path | None, trace: Path | None, **chosen: Any) -> None:
    """Runs a benchmark, prints its table, writes its files, and ends with its status."""
    from ..bench.run import run

    command = f"bench {shape.case}"
    try:
        options = Options(shape, trace=trace is not None, **chosen)
        files = [file for file in (json, trace) if file is not None]
        if len({file.absolute() for file in files}) < len(files):
            raise ValueError(f"--json and --trace both name {json}")
        for file in files:
            check_writable(file)
    except ValueError as error:
        raise refused(command, error) from None
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

    from ..bench.table import table

    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table(outcome.result))
    for note in outcome.notes:
        console.print(note, markup=False)
    if json is not None:
        json.write_text(dumps(outcome.result, indent=1) + "\n", encoding="utf-8")
    if trace is not None and outcome.trace is not None:
        outcome.trace.save(trace)
