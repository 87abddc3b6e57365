"""A whole data-parallel step as one schedule: forward, backward, and what hides behind them.

Pieces carry the number of their layer first: ``p2_0.1`` is split 1 of the piece of layer 2's gradient that rank 0 owns.
Rank 0 of 2, two layers, ``gradients``: weights (x) arrive under forward (y), gradients (p) leave behind backward (d):

    net  [x0_0>1 <1][x1_0>1 <1]                   [p1_1>1 <1]             [p0_1>1 <1]
    mm   [y0_0     ][y0_1     ][y1_0][y1_1][p1_1 ][z1_0     ][d1  ][p0_1 ][z0_0     ][z1+=][d0  ][z0+=]

The rules are those of the executor: what is needed first is posted first; a reduction is left open behind the layers
that follow, and summed when the next one has been posted, so that its gather leaves behind the next reduction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from .patterns import build, split_sizes
from .schedule import Compute, Exchange, Op, Program, Schedule, ScheduleError, Size

SHARDS = ("none", "gradients", "parameters")


def data_parallel_step(
    layers: Sequence[Sequence[int]], *, shard: str = "none", splits: int = 1, row_bytes: int = 1
) -> Schedule:
    """Builds one step of a stack of layers; its kernels are ``mm`` (forward), ``dgrad`` and ``wgrad``.

    Args:
        layers: for each layer, first to last, the rows of its weight that each rank owns.
        shard: "none": gradients are summed, and gathered behind backward. "gradients": weights are gathered under
            forward, gradients are summed. "parameters": weights are gathered under backward as well.
        splits: parts of each piece.
        row_bytes: of a row of a weight.

    Raises:
        ScheduleError: no layers, different numbers of ranks, an unknown ``shard``.
    """
    counts = sorted({len(rows) for rows in layers})
    if len(counts) != 1 or shard not in SHARDS:
        raise ScheduleError(
            f"a step needs layers of one number of ranks and a shard of {SHARDS}, not {counts}, {shard!r}"
        )
    programs = tuple(tuple(_step(layers, shard, splits, rank)) for rank in range(counts[0]))
    return Schedule(f"data_parallel_step_{shard}", programs, tuple(_sizes(layers, shard, splits, row_bytes)))


def _sizes(layers: Sequence[Sequence[int]], shard: str, splits: int, row_bytes: int) -> Iterable[tuple[str, Size]]:
    for layer, rows in enumerate(layers):
        for letter in "xyhpzud" if shard == "parameters" else "xyhpz":
            for owner, owned in enumerate(rows):
                for split, part in enumerate(split_sizes(owned, splits)):
                    yield f"{letter}{layer}_{owner}" + (f".{split}" if splits > 1 else ""), Size(part, row_bytes)
        if shard != "parameters":
            yield f"u{layer}", Size(sum(rows), row_bytes)
            yield f"d{layer}", Size(sum(rows), row_bytes)


def _step(layers: Sequence[Sequence[int]], shard: str, splits: int, rank: int) -> Iterable[Op]:
    """One rank's program."""

    def gather(layer: int, letters: str, kernel: str) -> tuple[Program, Program]:
        """The exchanges of a layer's gather, and the kernels that use what they bring."""
        program = build("param_all_gather", layers[layer], splits=splits).programs[rank]
        program = tuple(_renamed(op, layer, dict(zip("xy", letters, strict=True)), kernel) for op in program)
        posts = tuple(takewhile(lambda op: isinstance(op, Exchange), program))
        return posts, program[len(posts) :]

    def reduction(layer: int) -> tuple[Program, Program]:
        """All of a layer's reduction that does not wait, and its sums."""
        program = build("grad_reduce_scatter", layers[layer], splits=splits).programs[rank]
        program = tuple(_renamed(op, layer, {}, "wgrad") for op in program)
        waits = [op for op in program if isinstance(op, Compute) and not op.kernel]
        return program[: len(program) - len(waits)], tuple(waits)

    def streamed(gathers: Sequence[tuple[Program, Program]], ahead: int) -> Iterable[Program]:
        """The kernels of each gather behind the exchanges of those that are posted ``ahead`` of it."""
        for at, (_, kernels) in enumerate(gathers):
            first, last = (0 if at == 0 else at + ahead), at + ahead + 1
            yield tuple(op for posts, _ in gathers[first:last] for op in posts) + kernels

    numbers = range(len(layers))
    forward = [gather(layer, "xy", "mm") for layer in numbers]
    if shard == "none":
        forward = [((), kernels) for _, kernels in forward]
    for part in streamed(forward, 1 if shard == "parameters" else len(layers)):
        yield from part
    again = [gather(layer, "ud", "dgrad") for layer in reversed(numbers)] if shard == "parameters" else []
    dgrads = iter(streamed(again, 1))
    open_sums: Program = ()
    for layer in reversed(numbers):
        program, sums = reduction(layer)
        yield from program
        yield from open_sums
        yield from next(dgrads, (Compute("dgrad", (f"u{layer}",), (f"d{layer}",)),))
        open_sums = sums + (gather(layer, "zz", "")[0] if shard == "none" else ())
    yield from open_sums


def _renamed(op: Op, layer: int, letters: dict[str, str], kernel: str) -> Op:
    """An operation of one layer's flow within the step."""

    def name(old: str) -> str:
        return f"{letters.get(old[0], old[0])}{layer}_{old[1:]}"

    if isinstance(op, Exchange):
        return op._replace(send=name(op.send), recv=name(op.recv))
    assert isinstance(op, Compute)
    reads, writes, adds = (tuple(map(name, names)) for names in (op.reads, op.writes, op.adds))
    return Compute(kernel if op.kernel else "", reads, writes, adds)
