"""Which mode a data-parallel step should take: the step of each is replayed on a machine, and the fastest is taken.

What is planned is a forward, a backward and all that moves for them: the matmuls of linears by :mod:`.matmul`, and the
copies of what travels at the bandwidth of memory. Activations, norms, the loss and the optimizer are left out, behind
which nothing is counted on to hide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from .candidate import Candidate
from .machine import Kernel, Machine
from .matmul import Matmul, Product
from .overlap import Overlap
from .plan import Plan, reason_of, simplest
from .schedule import Compute, Op, Programs, Schedule
from .simulate import simulate
from .step import data_parallel_step
from .wire_bound import least_wire_seconds

_SPLITS = (1, 2, 4, 8)  # of the first linear's pieces
_MOST_WHOLE_BYTES = 1 << 24  # of gradients that "off" has whole, where each rank needs a shard of them


class Layer(NamedTuple):
    """Parameters that travel together: the weight of a linear, or others, which no kernel of the plan computes with.

    ``rows`` of each rank's piece, those of a linear's weight, and bytes of one. Of a linear also its input ``features``
    and the ``tokens`` of a step (0: it is none), and whether its input gets a gradient: it is ``chained`` to the layer
    before. ``splits`` are the parts of a piece in mode "flash".
    """

    rows: int
    row_bytes: int
    features: int = 0
    tokens: int = 0
    chained: bool = False
    splits: int = 1

    def kernels(self, matmul: Matmul, whole: bool) -> dict[str, Kernel]:
        """By name; where kernels are ``whole``, a gradient is made a mean in a pass of its own."""
        pass_s = 2 * self.row_bytes / matmul.memory_bytes_per_s
        if not self.tokens:
            return {"mm": Kernel(0.0, pass_s), "wgrad": Kernel(0.0, pass_s)}  # packed, and unpacked
        itemsize = self.row_bytes // self.features
        across = Product(matmul, self.features, self.tokens, itemsize)
        wgrad = Product(matmul, self.tokens, self.features, itemsize)
        dgrad = Product(matmul, self.tokens, self.features, itemsize, summed=True)
        return {
            "mm": Kernel(products=(across,)),
            "wgrad": Kernel(0.0, pass_s if whole else 0.0, (wgrad,)),
            "dgrad": Kernel(products=(dgrad,)),
        }


@dataclass(frozen=True)
class StepPlan(Plan):
    """What :func:`plan_step` found.

    Args:
        stack: layers, first to last.
        shard: as in :func:`~flashoverlap.step.data_parallel_step`.
    """

    stack: tuple[Layer, ...] = ()
    shard: str = "none"

    def schedule(self) -> Schedule:
        """The step that is taken; each kernel has the number of its layer behind its name."""
        return _schedule(self.stack, len(self.rows), self.shard, self.choice)


def plan_step(
    layers: Sequence[Layer], machine: Machine, *, ranks: int, shard: str = "none", overlap: Overlap = Overlap()
) -> StepPlan:
    """Plans one data-parallel step: simulates it in every mode that ``overlap`` leaves open.

    In mode "auto" these are "off", and "flash" with several numbers of splits of the first linear: behind its gradient,
    and before its weight is used, nothing else hides what travels. The simplest that comes within 1 % of the fastest is
    taken, so that "off" is where nothing is to be gained; not where gradients are sharded and many, since "off" has all
    of them whole at the end of backward.

    Args:
        layers: first to last; ranks are taken as alike.
        machine: with ``matmul``, and without kernels of its own.
        ranks: how many.
        shard: what is sharded.
        overlap: mode, and ``splits`` of every linear where they are given; rounds are those of pattern "direct".

    Raises:
        ValueError: a machine without ``matmul`` or of other ranks, a pattern "ring".
        ScheduleError: no layers, no ranks, an unknown ``shard``.
    """
    if machine.matmul is None:
        raise ValueError("a step is planned on a machine with matmul, and this one has none")
    if overlap.pattern != "direct":
        raise ValueError(f"a step is planned in pattern 'direct', not {overlap.pattern!r}")
    machine.check_ranks(ranks)
    stack = tuple(layers)
    planner = _Planner(stack, machine, machine.matmul, ranks, shard)
    found: list[Candidate] = []
    for of_one_mode in _candidates(stack, ranks, shard, overlap):
        last_s = math.inf
        for each in of_one_mode:
            found.append(planner.simulated(each))
            if found[-1].seconds >= last_s:
                break
            last_s = found[-1].seconds
    choice = simplest(found)
    others = sorted((each for each in found if each is not choice), key=lambda each: (each.seconds, each))
    took = f"a step's linears and exchanges are predicted to take {choice.seconds * 1e3:.3f} ms in all"
    code, reason = reason_of(choice, others, ranks, took, lambda rival, ms: f"{ms} in {rival}")
    op, rows = f"data_parallel_step_{shard}", (sum(layer.rows for layer in stack),) * ranks
    wire_s = least_wire_seconds(_schedule(stack, ranks, shard, Candidate("off", "sliced", 1)), machine)
    return StepPlan(
        op,
        op,
        rows,
        row_bytes=(),
        tensors=len(stack),
        candidates=(choice, *others),
        compute_s=planner.compute_s,
        wire_s=wire_s,
        code=code,
        reason=reason,
        stack=stack,
        shard=shard,
    )


def cut(layers: Sequence[Layer], splits: int) -> tuple[Layer, ...]:
    """The layers with other splits of the first linear."""
    first = next((at for at, layer in enumerate(layers) if layer.tokens), None)
    return tuple(layer._replace(splits=splits) if at == first else layer for at, layer in enumerate(layers))


def _candidates(layers: Sequence[Layer], ranks: int, shard: str, overlap: Overlap) -> Iterator[Sequence[Candidate]]:
    """By mode; of those of one mode a later one is tried where the one before it has gained something."""
    linears = [layer for layer in layers if layer.tokens]
    if ranks == 1 or overlap.mode in ("slice", "collective"):
        yield [Candidate("flash" if overlap.mode == "auto" else overlap.mode, "direct", 1)]
        return
    nbytes = ranks * sum(layer.rows * layer.row_bytes for layer in layers)
    if overlap.mode == "off" or (overlap.mode == "auto" and (shard == "none" or nbytes <= _MOST_WHOLE_BYTES)):
        yield [Candidate("off", "sliced", 1)]
    if overlap.mode in ("auto", "flash"):
        splits = [linears[0].splits] if linears else [1]
        if linears and overlap.mode == "auto" and not overlap.splits:
            least = min((layer.splits for layer in linears[1:]), default=1)  # that memory allows
            splits = [each for each in _SPLITS if least <= each <= max(least, linears[0].rows)]
        yield [Candidate("flash", "direct", each) for each in splits]


class _Planner:
    """The steps of one stack on one machine."""

    def __init__(self, layers: tuple[Layer, ...], machine: Machine, matmul: Matmul, ranks: int, shard: str) -> None:
        self._layers, self._ranks, self._shard = layers, ranks, shard
        rows = sum(layer.rows for layer in layers)
        add_s = 3 * sum(layer.rows * layer.row_bytes for layer in layers) / max(1, rows) / matmul.memory_bytes_per_s
        self._machines = {
            whole: replace(machine, kernels=_kernels(layers, matmul, whole), add=Kernel(0.0, add_s))
            for whole in (False, True)
        }

    def simulated(self, candidate: Candidate) -> Candidate:
        """The candidate with what the step takes."""
        machine = self._machines[candidate.mode != "flash"]
        schedule = _schedule(self._layers, self._ranks, self._shard, candidate)
        return candidate._replace(seconds=simulate(schedule, machine, spans=False).makespan_s)

    @property
    def compute_s(self) -> float:
        """Seconds of the linears' matmuls, each in one call."""
        kernels = self._machines[False].kernels
        return sum(
            kernels[f"{name}{number}"].seconds(layer.rows * self._ranks)
            for number, layer in enumerate(self._layers)
            if layer.tokens
            for name in ("mm", "wgrad", *(["dgrad"] if layer.chained else []))
        )


def _kernels(layers: Sequence[Layer], matmul: Matmul, whole: bool) -> dict[str, Kernel]:
    return {
        f"{name}{number}": kernel
        for number, layer in enumerate(layers)
        for name, kernel in layer.kernels(matmul, whole).items()
    }


def _schedule(layers: Sequence[Layer], ranks: int, shard: str, candidate: Candidate) -> Schedule:
    stack = cut(layers, candidate.splits) if candidate.mode == "flash" else layers
    step = data_parallel_step(
        [[layer.rows] * ranks for layer in stack],
        shard=shard,
        mode=candidate.mode,
        splits=[layer.splits for layer in stack],
        row_bytes=[layer.row_bytes for layer in stack],
        unchained=[number for number, layer in enumerate(stack) if not layer.chained],
    )
    programs = Programs(partial(_told_apart, step), ranks, 1)
    return Schedule(step.op, programs, step.sizes)


def _told_apart(step: Schedule, rank: int) -> Iterator[Op]:
    """A rank's program with the number of its layer behind each kernel's name, since layers differ."""
    for op in step.programs[rank]:
        if isinstance(op, Compute) and op.kernel:
            number = op.writes[0][1:].partition("_")[0]
            op = op._replace(kernel=op.kernel + number)
        yield op
