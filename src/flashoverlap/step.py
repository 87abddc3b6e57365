"""A whole data-parallel step as one schedule: forward, backward, and what hides behind them.

Pieces carry the number of their layer first: ``p2_0.1`` is split 1 of the piece of layer 2's gradient that rank 0 owns.
Rank 0 of 2, two layers, ``gradients``: weights (x) arrive under forward (y), gradients (p) leave behind backward (d):

    net  [x0_0>1 <1][x1_0>1 <1]                   [p1_1>1 <1]             [p0_1>1 <1]
    mm   [y0_0     ][y0_1     ][y1_0][y1_1][p1_1 ][z1_0     ][d1  ][p0_1 ][z0_0     ][z1+=][d0  ][z0+=]

The rules are those of the executor: what is needed first is posted first; a reduction is left open behind the layers
that follow, and summed when the next one has been posted, so that its gather leaves behind the next reduction.

That is mode ``flash``. In the others kernels are whole. ``slice`` has the same exchanges, posted once a layer has made
both of its gradients. In ``off`` and ``collective`` nothing is computed while something moves: weights come before the
kernels that use them, and sums are made when all of backward is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, takewhile
from operator import attrgetter
from typing import NamedTuple

from .patterns import build, split_sizes
from .schedule import Collective, Compute, Exchange, Op, Program, Programs, Schedule, ScheduleError, Size

SHARDS = ("none", "gradients", "parameters")
MODES = ("flash", "slice", "off", "collective")


class _Layer(NamedTuple):
    """One layer of a step; ``chained``: whether the gradient of its input is computed."""

    number: int
    rows: Sequence[int]
    splits: int
    row_bytes: int
    chained: bool


def data_parallel_step(
    layers: Sequence[Sequence[int]],
    *,
    shard: str = "none",
    mode: str = "flash",
    splits: int | Sequence[int] = 1,
    row_bytes: int | Sequence[int] = 1,
    unchained: Iterable[int] = (),
) -> Schedule:
    """Builds one step of a stack of layers; its kernels are ``mm`` (forward), ``dgrad`` and ``wgrad``.

    Args:
        layers: for each layer, first to last, the rows of its weight that each rank owns.
        shard: "none": gradients are summed, and gathered behind backward. "gradients": weights are gathered under
            forward, gradients are summed. "parameters": weights are gathered under backward as well.
        mode: "flash", "slice", "off" or "collective".
        splits: parts of each piece, in mode "flash"; those of each layer where they differ.
        row_bytes: of a row of a weight; those of each layer where they differ.
        unchained: numbers of the layers whose input needs no gradient: they have no ``dgrad``, nor a gather for it.

    Raises:
        ScheduleError: no layers, different numbers of ranks, an unknown ``shard`` or ``mode``.
    """
    counts = sorted({len(rows) for rows in layers})
    if len(counts) != 1 or shard not in SHARDS:
        raise ScheduleError(
            f"a step needs layers of one number of ranks and a shard of {SHARDS}, not {counts}, {shard!r}"
        )
    if mode not in MODES:
        raise ScheduleError(f"a step needs a mode of {MODES}, not {mode!r}")
    alone = set(unchained)
    parts = _of_each(splits if mode == "flash" else 1, layers)
    made = [
        _Layer(number, rows, part, width, number not in alone)
        for number, (rows, part, width) in enumerate(zip(layers, parts, _of_each(row_bytes, layers), strict=True))
    ]
    ranks, step = counts[0], _Step(made, shard, mode)
    period = 1 if all(len(set(rows)) == 1 for rows in layers) else ranks
    programs = Programs(step.program, ranks, period)
    return Schedule(f"data_parallel_step_{shard}", programs, tuple(_sizes(made, shard)))


def _of_each(value: int | Sequence[int], layers: Sequence[object]) -> Sequence[int]:
    return [value] * len(layers) if isinstance(value, int) else value


def _sizes(layers: Sequence[_Layer], shard: str) -> Iterator[tuple[str, Size]]:
    for number, rows, splits, row_bytes, chained in layers:
        for letter in "xyhpzud" if shard == "parameters" and chained else "xyhpz":
            for owner, owned in enumerate(rows):
                for split, part in enumerate(split_sizes(owned, splits)):
                    yield f"{letter}{number}_{owner}" + (f".{split}" if splits > 1 else ""), Size(part, row_bytes)
        if shard != "parameters" and chained:
            yield f"u{number}", Size(sum(rows), row_bytes)
            yield f"d{number}", Size(sum(rows), row_bytes)


class _Stages(NamedTuple):
    """A layer's reduction, or one part of it: its kernels, with what leaves between them; its sums; and the gather of
    what has been summed."""

    begun: Program
    sums: Program
    gather: Program


class _Step:
    """The programs of a step."""

    def __init__(self, layers: Sequence[_Layer], shard: str, mode: str) -> None:
        self._layers, self._shard, self._mode = layers, shard, mode
        self._pattern = "collective" if mode == "collective" else "direct"
        self._overlaps = mode in ("flash", "slice")

    def program(self, rank: int) -> Iterator[Op]:
        """That of one rank."""
        yield from self._forward(rank)
        yield from self._backward(rank) if self._overlaps else self._backward_and_then_sums(rank)

    def _forward(self, rank: int) -> Iterator[Op]:
        gathers = [self._gather(layer, "xy", "mm", rank) for layer in self._layers]
        if self._shard == "none":
            gathers = [((), _whole(kernels)) for _, kernels in gathers]
        for part in self._streamed(gathers, 1 if self._shard == "parameters" else len(gathers)):
            yield from part

    def _backward(self, rank: int) -> Iterator[Op]:
        dgrads = self._dgrads(rank)
        open_sums: Program = ()
        for layer in reversed(self._layers):
            parts = self._reduction(layer, rank)
            begun = tuple(op for part in parts for op in part.begun)
            if self._mode == "slice":
                yield from _whole(begun)
                yield from next(dgrads) if layer.chained else ()
                yield from _moves(begun)
                yield from open_sums
            else:
                yield from begun
                yield from open_sums
                yield from next(dgrads) if layer.chained else ()
            open_sums = tuple(op for part in parts for op in part.sums + part.gather)
        yield from open_sums

    def _backward_and_then_sums(self, rank: int) -> Iterator[Op]:
        dgrads = self._dgrads(rank)
        reductions = [part for layer in reversed(self._layers) for part in self._reduction(layer, rank)]
        for layer, part in zip(reversed(self._layers), reductions, strict=True):
            yield from _whole(part.begun)
            yield from next(dgrads) if layer.chained else ()
        for part in reductions:
            yield from _moves(part.begun) + part.sums + part.gather

    def _dgrads(self, rank: int) -> Iterator[Program]:
        """The gradients of inputs, last to first, behind the exchanges that are posted by then."""
        chained = [layer for layer in reversed(self._layers) if layer.chained]
        if self._shard == "parameters":
            return self._streamed([self._gather(layer, "ud", "dgrad", rank) for layer in chained], 1)
        return iter([(Compute("dgrad", (f"u{layer.number}",), (f"d{layer.number}",)),) for layer in chained])

    def _streamed(self, gathers: Sequence[tuple[Program, Program]], ahead: int) -> Iterator[Program]:
        """The kernels of each gather behind the exchanges of those that are posted ``ahead`` of it."""
        ahead = ahead if self._overlaps else 0
        for at, (_, kernels) in enumerate(gathers):
            first, last = (0 if at == 0 else at + ahead), at + ahead + 1
            yield tuple(op for posts, _ in gathers[first:last] for op in posts) + kernels

    def _gather(self, layer: _Layer, letters: str, kernel: str, rank: int) -> tuple[Program, Program]:
        """The exchanges of a layer's gather, and the kernels that use what they bring."""
        built = build("param_all_gather", layer.rows, pattern=self._pattern, splits=layer.splits).programs[rank]
        renamed = tuple(_renamed(op, layer.number, dict(zip("xy", letters, strict=True)), kernel) for op in built)
        posts = tuple(takewhile(lambda op: not isinstance(op, Compute), renamed))
        kernels = renamed[len(posts) :]
        return posts, kernels if self._mode == "flash" else _whole(kernels)

    def _reduction(self, layer: _Layer, rank: int) -> list[_Stages]:
        """A layer's reduction, part by part."""
        return [self._stages(layer, part, rank) for part in range(layer.splits)]

    def _stages(self, layer: _Layer, part: int, rank: int) -> _Stages:
        rows = [split_sizes(owned, layer.splits)[part] for owned in layer.rows]
        ending = f".{part}" if layer.splits > 1 else ""

        def built(op: str, letters: dict[str, str]) -> Program:
            program = build(op, rows, pattern=self._pattern).programs[rank]
            return tuple(_renamed(each, layer.number, letters, "wgrad", ending) for each in program)

        reduction = built("grad_reduce_scatter", {})
        sums = tuple(op for op in reduction if isinstance(op, Compute) and not op.kernel)
        gather = built("param_all_gather", {"x": "z", "y": "z"}) if self._shard == "none" else ()
        return _Stages(reduction[: len(reduction) - len(sums)], sums, _moves(gather))


def _moves(program: Program) -> Program:
    """What of a program is no kernel."""
    return tuple(op for op in program if not isinstance(op, Compute))


def _whole(program: Program) -> Program:
    """The kernels of a program as one."""
    kernels = [op for op in program if isinstance(op, Compute)]
    reads, writes = (tuple(chain.from_iterable(map(names, kernels))) for names in (_READS, _WRITES))
    return (Compute(kernels[0].kernel, reads, writes),)


_READS, _WRITES = attrgetter("reads"), attrgetter("writes")


def _renamed(op: Op, layer: int, letters: dict[str, str], kernel: str, ending: str = "") -> Op:
    """An operation of one layer's flow within the step."""

    def name(old: str) -> str:
        return f"{letters.get(old[0], old[0])}{layer}_{_with(ending, old[1:])}"

    if isinstance(op, Exchange):
        return op._replace(send=name(op.send), recv=name(op.recv))
    if isinstance(op, Collective):
        return op._replace(reads=tuple(map(name, op.reads)), writes=tuple(map(name, op.writes)))
    reads, writes, adds = (tuple(map(name, names)) for names in (op.reads, op.writes, op.adds))
    return Compute(kernel if op.kernel else "", reads, writes, adds)


def _with(ending: str, name: str) -> str:
    """A name with its split, in front of where it came from."""
    piece, at, source = name.partition("@")
    return piece + ending + at + source
