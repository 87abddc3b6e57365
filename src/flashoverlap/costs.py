"""What one operation of a schedule costs on a machine, beside nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .machine import Machine
from .schedule import Collective, Compute, Schedule, ScheduleError


def compute_seconds(op: Compute, schedule: Schedule, machine: Machine) -> float:
    """The kernel on all rows that it reads, and each addition on the rows that it adds."""
    seconds = machine.kernel(op.kernel).seconds(_rows(op.reads, schedule)) if op.kernel else 0.0
    added = op.adds if op.kernel else op.adds[1:]  # the first term of a pure sum is what the others are added to
    return seconds + sum(machine.add.seconds(schedule.size(name).rows) for name in added)


def collective_cost(ops: Sequence[Collective], schedule: Schedule, machine: Machine) -> tuple[float, list[int]]:
    """Seconds of one collective, ``ops[rank]`` being each rank's view of it, and the bytes that each rank moves.

    The bytes are those of the ideal algorithm; the rank that has most to move sets the time.
    """
    for rank, op in enumerate(ops):
        if op.kind != ops[0].kind:
            raise ScheduleError(f"{ops[0].kind} on rank 0 meets {op.kind} on rank {rank}")
    moved = [round(_collective_bytes(op, len(ops), schedule)) for op in ops]
    rounds = (len(ops) - 1) * (2 if ops[0].kind == "all_reduce" else 1)
    return machine.collective_s(rounds, max(moved)), moved


def _collective_bytes(op: Collective, ranks: int, schedule: Schedule) -> float:
    """Bytes that a rank sends or receives, whichever is more; shares are of rows, as dtypes may differ."""
    read, write = _bytes(op.reads, schedule), _bytes(op.writes, schedule)
    if op.kind == "all_gather":
        return write * (1 - _rows(op.reads, schedule) / (_rows(op.writes, schedule) or 1))
    if op.kind == "reduce_scatter":
        return read * (1 - _rows(op.writes, schedule) / (_rows(op.reads, schedule) or 1))
    if op.kind == "all_reduce":
        return 2 * read * (ranks - 1) / ranks
    stays = _bytes(set(op.reads) & set(op.writes), schedule)
    return max(read, write) - stays


def _rows(names: Iterable[str], schedule: Schedule) -> int:
    return sum(schedule.size(name).rows for name in names)


def _bytes(names: Iterable[str], schedule: Schedule) -> int:
    return sum(schedule.size(name).bytes for name in names)
