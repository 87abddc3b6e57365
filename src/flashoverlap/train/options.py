"""What a training run is to do: every option once, with its help, its default and its checks.

The command line of the ranks' program and that of ``flashoverlap train`` are both made from this one class.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ..arguments import whole
from ..overlap import ATTENTIONS, MODES, Overlap

DTYPES = ("fp32", "bf16")
SLICES = (2, 4, 8)  # tried by --compare
_CHECKPOINT_EVERY = 50


def _decimal(text: str | float) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def _count(text: str) -> Any:
    return typer.Option(help=text, metavar="N", parser=whole)


def _number(text: str) -> Any:
    return typer.Option(help=text, metavar="X", parser=_decimal)


@dataclass(frozen=True)
class Options:
    """One training run, as each of its ranks is to do it.

    Raises:
        ValueError: an unknown name, a number out of range, or options that contradict each other or would be ignored;
            the message has the option and its value.
    """

    steps: Annotated[int, _count("Optimizer steps in all.")] = 100
    model: Annotated[str, typer.Option(help="small, or the path of a config.json of transformers.")] = "small"
    data: Annotated[
        Path | None, typer.Option(help="UTF-8 file, or folder of such. The sources of Python's library unless given.")
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="New folder for checkpoints, metrics.jsonl and loss.png. None unless given.")
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")] = False
    overlap: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(MODES)}. flash unless given.", metavar="MODE")
    ] = None
    attention: Annotated[
        str, typer.Option(help=f"Cut by queries, or left to the model: one of {', '.join(ATTENTIONS)}.", metavar="HOW")
    ] = "query_split"
    splits: Annotated[int | None, _count("Splits of flash and auto. The library's rule unless given.")] = None
    slices: Annotated[int | None, _count("Slices of slice. 4 unless given; the best of 2, 4, 8 with --compare.")] = None
    compare: Annotated[
        bool, typer.Option("--compare", help="Run the same steps with off, slice and flash in turn, and compare them.")
    ] = False
    batch: Annotated[int, _count("Sequences of a micro-batch.")] = 2
    seq: Annotated[int, _count("Tokens of a sequence.")] = 1024
    accumulate: Annotated[int, _count("Micro-batches of a step.")] = 1
    lr: Annotated[float, _number("Highest learning rate.")] = 3e-4
    warmup: Annotated[int | None, _count("Steps of linear warm-up. A fifth of all unless given, 100 at most.")] = None
    clip: Annotated[float, _number("Largest norm of the gradient; 0 clips nothing.")] = 1.0
    dtype: Annotated[str, typer.Option(help="fp32 or bf16 (weights and AdamW stay in float32).", metavar="DTYPE")] = (
        "fp32"
    )
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Compute each layer's activations anew in the backward.")
    ] = False
    checkpoint_every: Annotated[int | None, _count(f"Steps between checkpoints, {_CHECKPOINT_EVERY} unless given.")] = (
        None
    )
    seed: Annotated[int, _count("Of the weights and of the order of the text.")] = 0
    json: Annotated[Path | None, typer.Option(help="File to write the result to.")] = None
    trace: Annotated[
        Path | None, typer.Option(help="File for a trace of one further forward and backward pass, for Perfetto.")
    ] = None
    terminal: Annotated[str, typer.Option(hidden=True, help="Device of the terminal that the bar is drawn on.")] = ""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "splits", "slices", "checkpoint_every"):
            _check_least(name, getattr(self, name), 1)
        for name in ("warmup", "seed"):
            _check_least(name, getattr(self, name), 0)
        _check_least("seq", self.seq, 2)
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"--lr {self.lr:g}: a number above 0 is needed")
        if not (math.isfinite(self.clip) and self.clip >= 0):
            raise ValueError(f"--clip {self.clip:g}: a number of 0 or more is needed")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype}: unknown; known: {', '.join(DTYPES)}")
        if self.attention not in ATTENTIONS:
            raise ValueError(f"--attention {self.attention}: unknown; known: {', '.join(ATTENTIONS)}")
        if self.overlap is not None and self.overlap not in MODES:
            raise ValueError(f"--overlap {self.overlap}: unknown; known: {', '.join(MODES)}")
        self._check_contradictions()
        self.how()

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
        return self.overlap or "flash"

    @property
    def queries(self) -> str | None:
        """What parallelize is told of attention."""
        return None if self.attention == "model" else self.attention

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


def _check_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ValueError(f"--{name.replace('_', '-')} {value}: at least {least} is needed")


def taking_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a function of ``**chosen`` all options as parameters, for typer to make a command line of."""
    hints = get_type_hints(Options, include_extras=True)
    own = [
        each for each in inspect.signature(function, eval_str=True).parameters.values() if each.kind != each.VAR_KEYWORD
    ]
    chosen = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name])
        for each in fields(Options)
        if each.default is not MISSING
    ]
    parameters = [*chosen[:1], *own, *chosen[1:]]
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    function.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    function.__annotations__ = {each.name: each.annotation for each in parameters}
    return function
