"""What ``flashoverlap plan`` is asked: a model on a cluster, a sweep over its splits, one operator, or the paper."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..arguments import count
from ..cluster.memory import SHARDS
from ..cluster.models import MODELS
from ..cluster.published import PUBLISHED

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
OPS = (
    "mlp",
    "all_gather_linear",
    "linear_reduce_scatter",
    "linear_all_reduce",
    "attention_reduce_scatter",
    "linear_all_to_all",
    "all_to_all_linear",
    "attention_all_to_all_linear",
)
_DEFAULTS = {"tp": 1, "up": 1, "dp": 1, "seq": 4096, "batch": 1, "accumulate": 1, "shard": "none"}
_STEP = ("model", "machine", "memory", "dtype", "seq", "batch", "shard", "recompute")
_TAKES = {  # what each question takes besides --json
    "model": (*_STEP, "tp", "up", "dp", "accumulate"),
    "sweep": (*_STEP, "sweep", "devices", "global_batch"),
    "op": ("op", "machine", "dtype", "tokens", "hidden", "ffn", "ranks"),
    "paper": ("paper",),
}
_NEEDS = {
    "model": ("machine",),
    "sweep": ("model", "machine", "devices"),
    "op": ("machine", "tokens", "hidden", "ranks"),
    "paper": (),
}


@dataclass(frozen=True)
class PlanOptions:
    """One question; None is what was not given.

    Raises:
        ValueError: no question or two, an option that it would ignore or that it lacks, a number below one, an unknown
            name.
    """

    model: Annotated[
        str | None, typer.Option(help=f"A config.json of transformers, or one of {', '.join(MODELS)}.", metavar="NAME")
    ] = None
    machine: Annotated[
        str | None, typer.Option(help=f"File of a calibration, or one of {', '.join(PUBLISHED)}.", metavar="NAME")
    ] = None
    tp: Annotated[int | None, count("Tensor-parallel ranks, 1 unless given.")] = None
    up: Annotated[int | None, count("Ranks that share a sequence (Ulysses), 1 unless given.")] = None
    dp: Annotated[int | None, count("Data-parallel replicas, 1 unless given.")] = None
    seq: Annotated[int | None, count("Tokens of a sequence, 4096 unless given.")] = None
    batch: Annotated[int | None, count("Sequences of one replica at a time, 1 unless given.")] = None
    accumulate: Annotated[int | None, count("Micro-batches of a step, 1 unless given.")] = None
    dtype: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(DTYPES)}; bf16 unless given, a calibration's own.")
    ] = None
    shard: Annotated[
        str | None, typer.Option(help=f"What replicas share: one of {', '.join(SHARDS)}; none unless given.")
    ] = None
    recompute: Annotated[bool, typer.Option("--recompute", help="Keep only the input of each layer for backward.")] = (
        False
    )
    memory: Annotated[int | None, count("GB of a device, in place of what is published.")] = None
    sweep: Annotated[bool, typer.Option("--sweep", help="Rank all splits of --devices into dp, up and tp.")] = False
    devices: Annotated[int | None, count("Devices to split.")] = None
    global_batch: Annotated[
        int | None, count("Sequences of all replicas in a step of a sweep; one --batch of each unless given.")
    ] = None
    op: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(OPS)}, alone or as in 'mlp backward'.", metavar="NAME")
    ] = None
    tokens: Annotated[int | None, count("Rows of the operator, of all ranks together.")] = None
    hidden: Annotated[int | None, count("Features of the model.")] = None
    ffn: Annotated[int | None, count("Features inside of an MLP, or of a linear's other side, of all ranks.")] = None
    ranks: Annotated[int | None, count("Ranks of the operator.")] = None
    paper: Annotated[bool, typer.Option("--paper", help="The MLP table of arXiv 2604.24013, out of two figures.")] = (
        False
    )
    json: Annotated[Path | None, typer.Option(help="File to write the result to.")] = None

    def __post_init__(self) -> None:
        takes = (*_TAKES[self.question], "json")
        for field in fields(self):
            value = getattr(self, field.name)
            if value not in (None, False) and field.name not in takes:
                raise ValueError(f"{_option(field.name, value)}: means nothing beside --{self.question}")
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ValueError(f"{_option(field.name, value)}: at least 1 is needed")
        missing = [name for name in _NEEDS[self.question] if getattr(self, name) is None]
        if missing:
            raise ValueError(f"--{self.question} needs --{' and --'.join(missing)}")
        op = self.op and self.op.removesuffix(" backward")
        for name, value, known in (("dtype", self.dtype, DTYPES), ("shard", self.shard, SHARDS), ("op", op, OPS)):
            if value is not None and value not in known:
                raise ValueError(f"--{name} {value}: unknown; known: {', '.join(known)}")

    @property
    def question(self) -> str:
        """Which of "model", "sweep", "op" and "paper" is asked."""
        asked = [name for name in ("sweep", "model", "op", "paper") if getattr(self, name)]
        asked = [name for name in asked if name != "model" or "sweep" not in asked]
        if len(asked) != 1:
            given = f", not {' and '.join('--' + name for name in asked)}" if asked else ""
            raise ValueError(f"one of --model, --op and --paper is needed{given}")
        return asked[0]

    def get(self, name: str) -> Any:
        """An option's value, or what stands for it where it was not given."""
        value = getattr(self, name)
        return _DEFAULTS[name] if value is None else value

    def sizes(self) -> dict[str, int]:
        """What the planner is told of an operator's sizes: those of one rank.

        Raises:
            ValueError: ranks that do not divide them, or --ffn where it means nothing or is missing.
        """
        assert self.op
        assert self.tokens
        assert self.hidden
        name, hidden = self.op.removesuffix(" backward"), self.hidden
        if name.startswith("attention"):
            if self.ffn is not None:
                raise ValueError(f"--ffn {self.ffn}: means nothing beside --op {self.op}")
            heads = {"heads": 1, "head_dim": self._part("hidden"), "keys": self.tokens, "causal": 1}
            return {"rows": self.tokens, **heads, "out": hidden}
        if self.ffn is None:
            raise ValueError(f"--op {self.op} needs --ffn")
        if name == "mlp":
            return {"rows": self.tokens, "features": hidden, "hidden": self._part("ffn")}
        if name == "all_gather_linear":
            return {"rows": self.tokens, "features": hidden, "out": self._part("ffn")}
        if name == "linear_all_to_all":
            return {"rows": self.tokens, "features": hidden, "out": self.ffn}
        return {"rows": self.tokens, "features": self._part("ffn"), "out": hidden}

    def _part(self, name: str) -> int:
        """The share of one rank."""
        assert self.ranks
        whole = getattr(self, name)
        if whole % self.ranks:
            raise ValueError(f"--{name} {whole}: does not divide by {self.ranks} ranks")
        return whole // self.ranks


def _option(name: str, value: object) -> str:
    name = "--" + name.replace("_", "-")
    return name if value is True else f"{name} {value}"
