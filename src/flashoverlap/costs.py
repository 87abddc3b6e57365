"""What one operation of a schedule costs on a machine, beside nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .machine import Machine
from .schedule import Collective, Compute, Schedule, ScheduleError


class ComputeCosts:
    """Seconds of the computations of one schedule on one machine, each told once."""

    def __init__(self, schedule: Schedule, machine: Machine) -> None:
        self._schedule, self._machine = schedule, machine
        self._of_op: dict[Compute, float] = {}
        self._of_kernel: dict[tuple[str, int], float] = {}

    def seconds(self, op: Compute) -> float:
        """The kernel on all rows that it reads, and each addition on the rows that it adds."""
        seconds = self._of_op.get(op)
        if seconds is None:
            seconds = self.kernel_seconds(op) if op.kernel else 0.0
            added = (
                op.adds if op.kernel else op.adds[1:]
            )  # the first term of a pure sum is what the others are added to
            for name in added:
                seconds += self._machine.add.seconds(self._schedule.size(name).rows)
            self._of_op[op] = seconds
        return seconds

    def kernel_seconds(self, op: Compute) -> float:
        """The kernel alone."""
        key = (op.kernel, _rows(op.reads, self._schedule))
        seconds = self._of_kernel.get(key)
        if seconds is None:
            seconds = self._of_kernel[key] = self._machine.kernel(op.kernel).seconds(key[1])
        return seconds


def collective_cost(
    ops: Sequence[Collective], ranks: int, schedule: Schedule, machine: Machine
) -> tuple[float, list[int]]:
    """Seconds of one collective of ``ranks`` ranks, and the bytes that each of those whose view ``ops`` holds moves.

    The bytes are those of the ideal algorithm; the rank that has most to move sets the time. Between nodes what a rank
    moves crosses the uplink of each node once, as in a ring; in an all-to-all as often as ranks of the node have sent.
    """
    for rank, op in enumerate(ops):
        if op.kind != ops[0].kind:
            raise ScheduleError(f"{ops[0].kind} on rank 0 meets {op.kind} on rank {rank}")
    moved = [round(_collective_bytes(op, ranks, schedule)) for op in ops]
    parts = 2 if ops[0].kind == "all_reduce" else 1  # a reduce-scatter and an all-gather
    sharing = 1.0
    if ops[0].kind == "all_to_all" and len(machine.nodes) > 1:
        sharing = max(size * (ranks - size) / (ranks - 1) for size in machine.nodes)
    seconds = machine.collective_s(parts * (ranks - 1), max(moved), sharing)
    return seconds + (parts * machine.collective_fixed_s if seconds else 0.0), moved


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
