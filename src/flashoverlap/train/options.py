"""What a training run is to do: every option once, with its help, its default and its checks.

The command line of the ranks' program and that of ``flashoverlap train`` are both made from this one class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..arguments import count, taking
from ..overlap import ATTENTIONS, MODES, Overlap
from .degrees import Degrees

DTYPES = ("fp32", "bf16")
SHARDS = ("none", "gradients", "parameters")  # as data_parallel takes them
SLICES = (2, 4, 8)  # tried by --compare
_CHECKPOINT_EVERY = 50


def _decimal(text: str | float) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def _number(text: str) -> Any:
    return typer.Option(help=text, metavar="X", parser=_decimal)


@dataclass(frozen=True)
class Options:
    """One training run, as each of its ranks is to do it.

    Raises:
        ValueError: an unknown name, a number out of range, or options that contradict each other or would be ignored;
            the message has the option and its value.
    """

    steps: Annotated[int, count("Optimizer steps in all.")] = 100
    model: Annotated[str, typer.Option(help="small, or the path of a config.json of transformers.")] = "small"
    data: Annotated[
        Path | None, typer.Option(help="UTF-8 file, or folder of such. The sources of Python's library unless given.")
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="New folder for checkpoints, metrics and report. None unless given.")
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")] = False
    overlap: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(MODES)}. auto unless given.", metavar="MODE")
    ] = None
    dp: Annotated[int, count("Ranks that the sequences of a batch are spread over.")] = 1
    shard: Annotated[
        str | None,
        typer.Option(help=f"What --dp shards: one of {', '.join(SHARDS)}. none unless given.", metavar="WHAT"),
    ] = None
    up: Annotated[int, count("Ranks that the tokens of a sequence are spread over (Ulysses).")] = 1
    tp: Annotated[
        int | None,
        count("Ranks that heads and features are spread over; those that --dp and --up leave, unless given."),
    ] = None
    attention: Annotated[
        str | None,
        typer.Option(
            help="query_split: cut by queries; model: left alone; ulysses: all tokens of some heads. The last where "
            "--up is more than 1, or else the first, unless given.",
            metavar="HOW",
        ),
    ] = None
    splits: Annotated[int | None, count("Splits of flash and auto. The library's rule unless given.")] = None
    slices: Annotated[int | None, count("Slices of slice. 4 unless given; the best of 2, 4, 8 with --compare.")] = None
    compare: Annotated[
        bool, typer.Option("--compare", help="Run the same steps with off, slice and flash in turn, and compare them.")
    ] = False
    batch: Annotated[int, count("Sequences of a micro-batch.")] = 2
    seq: Annotated[int, count("Tokens of a sequence.")] = 1024
    accumulate: Annotated[int, count("Micro-batches of a step.")] = 1
    lr: Annotated[float, _number("Highest learning rate.")] = 3e-4
    warmup: Annotated[int | None, count("Steps of linear warm-up. A fifth of all unless given, 100 at most.")] = None
    clip: Annotated[float, _number("Largest norm of the gradient; 0 clips nothing.")] = 1.0
    dtype: Annotated[str, typer.Option(help="fp32 or bf16 (weights and AdamW stay in float32).", metavar="DTYPE")] = (
        "fp32"
    )
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Compute each layer's activations anew in the backward.")
    ] = False
    checkpoint_every: Annotated[int | None, count(f"Steps between checkpoints, {_CHECKPOINT_EVERY} unless given.")] = (
        None
    )
    seed: Annotated[int, count("Of the weights and of the order of the text.")] = 0
    json: Annotated[Path | None, typer.Option(help="File to write the result to.")] = None
    trace: Annotated[
        Path | None, typer.Option(help="File for a trace of one further forward and backward pass, for Perfetto.")
    ] = None
    terminal: Annotated[str, typer.Option(hidden=True, help="Device of the terminal that the bar is drawn on.")] = ""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "splits", "slices", "checkpoint_every", "dp", "up", "tp"):
            _check_least(name, getattr(self, name), 1)
        for name in ("warmup", "seed"):
            _check_least(name, getattr(self, name), 0)
        _check_least("seq", self.seq, 2)
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"--lr {self.lr:g}: a number above 0 is needed")
        if not (math.isfinite(self.clip) and self.clip >= 0):
            raise ValueError(f"--clip {self.clip:g}: a number of 0 or more is needed")
        _check_name("dtype", self.dtype, DTYPES)
        _check_name("attention", self.attention, (*ATTENTIONS, "ulysses"))
        _check_name("shard", self.shard, SHARDS)
        _check_name("overlap", self.overlap, MODES)
        self._check_degrees()
        self._check_contradictions()
        self.how()

    def _check_degrees(self) -> None:
        if self.batch % self.dp:
            raise ValueError(f"--batch {self.batch}: cannot be spread evenly over --dp {self.dp}")
        if self.shard is not None and self.dp == 1:
            raise ValueError(f"--shard {self.shard}: shards over --dp N, which is 1")
        if self.attention is not None and (self.attention == "ulysses") != (self.up > 1):
            raise ValueError(
                f"--attention {self.attention}: does not go with --up {self.up}; tokens are spread with ulysses, and "
                "with nothing else"
            )

    def _check_contradictions(self) -> None:
        if self.compare and self.overlap is not None:
            raise ValueError(f"--overlap {self.overlap}: --compare runs off, slice and flash; leave one of the two out")
        if self.compare and self.checkpoint_every is not None:
            raise ValueError(f"--checkpoint-every {self.checkpoint_every}: --compare writes no checkpoints")
        if self.compare and self.resume:
            raise ValueError("--resume: --compare writes no checkpoints to resume from")
        if self.out is None and self.resume:
            raise ValueError("--resume: name the folder to resume from with --out DIR")
        if self.out is None and self.checkpoint_every is not None:
            raise ValueError(f"--checkpoint-every {self.checkpoint_every}: name a folder for checkpoints, --out DIR")
        if self.json is not None and self.trace is not None and self.json.absolute() == self.trace.absolute():
            raise ValueError(f"--json and --trace both name {self.json}")

    @property
    def mode(self) -> str:
        """The mode of a plain run."""
        return self.overlap or "auto"

    def degrees(self, ranks: int) -> Degrees:
        """How so many ranks are used.

        Raises:
            ValueError: the degrees do not make up the ranks.
        """
        return Degrees.of(ranks, self.dp, self.up, self.tp)

    @property
    def least_ranks(self) -> int:
        """The ranks that the degrees ask for; 2 where none is given."""
        given = self.dp * self.up * (self.tp or 1)
        return 2 if (self.dp, self.up, self.tp) == (1, 1, None) else given

    @property
    def sharding(self) -> str:
        """What data_parallel is told of sharding."""
        return self.shard or "none"

    @property
    def attending(self) -> str | None:
        """What parallelize is told of attention."""
        chosen = self.attention or ("query_split" if self.up == 1 else "ulysses")
        return None if chosen == "model" else chosen

    def how(self) -> Overlap:
        """How the operators of a plain run are called.

        Raises:
            ValueError: --splits or --slices would be ignored.
        """
        if self.compare:
            return Overlap("flash", splits=self.splits)
        if self.splits is not None and self.mode not in ("flash", "auto"):
            raise ValueError(f"--splits {self.splits}: means nothing in mode {self.mode}")
        if self.slices is not None and self.mode != "slice":
            raise ValueError(f"--slices {self.slices}: means nothing in mode {self.mode}")
        return Overlap(self.mode, splits=self.splits, slices=self.slices)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that go into one optimizer step."""
        return self.batch * self.accumulate * self.seq

    @property
    def warmup_steps(self) -> int:
        """Steps in which the learning rate climbs."""
        return min(100, -(-self.steps // 5)) if self.warmup is None else self.warmup

    @property
    def steps_per_checkpoint(self) -> int:
        """Steps between two checkpoints."""
        return self.checkpoint_every or _CHECKPOINT_EVERY

    def arguments(self) -> list[str]:
        """The command line that gives these options."""
        words: list[str] = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value != each.default:
                name = "--" + each.name.replace("_", "-")
                words += [name] if value is True else [f"{name}={value}"]
        return words


def _check_name(name: str, value: str | None, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        raise ValueError(f"--{name} {value}: unknown; known: {', '.join(known)}")


def _check_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ValueError(f"--{name.replace('_', '-')} {value}: at least {least} is needed")


def taking_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a function of ``**chosen`` all options as parameters, for typer to make a command line of."""
    return taking(Options)(function)
