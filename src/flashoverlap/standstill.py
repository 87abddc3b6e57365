"""Why a schedule cannot be replayed to its end: the error, with the place marked in the programs."""

from __future__ import annotations

from typing import NamedTuple

from .schedule import Collective, Compute, Exchange, Schedule, ScheduleError


class Standing(NamedTuple):
    """Where a rank stands when nothing moves any more.

    Args:
        next_op: index of the operation that it would issue next.
        wire: its exchanges and collectives that are posted.
        sent: how many of them have begun to leave.
        received: how many have begun to come.
        at_collective: whether it waits for the others to come to a collective.
    """

    next_op: int
    wire: list[Exchange | Collective]
    sent: int
    received: int
    at_collective: bool


def check_ranks(schedule: Schedule) -> None:
    """Raises ScheduleError where an exchange names a rank that is not there."""
    ranks = range(schedule.ranks)
    for rank, program in enumerate(schedule.programs):
        for index, op in enumerate(program):
            if isinstance(op, Exchange) and not (op.to in ranks and op.frm in ranks):
                raise ScheduleError(f"{op} names a rank that is not one of {schedule.ranks}", schedule, rank, index)


def standstill(schedule: Schedule, ranks: list[Standing]) -> ScheduleError:
    """The error for a schedule that came to a standstill, at the first wire operation that never ended."""
    number, rank = next((n, rank) for n, rank in enumerate(ranks) if min(rank.sent, rank.received) < len(rank.wire))
    at = min(rank.sent, rank.received)
    op = rank.wire[at]
    if isinstance(op, Collective):
        others = [other for other, standing in enumerate(ranks) if not standing.at_collective]
        why = f"{op.kind} waits for ranks {others}"
    elif at == rank.sent:
        why = f"{op.send} never leaves for rank {op.to}: {_next(schedule, ranks, op.to, receiving=True)}"
    else:
        why = f"{op.recv} never comes from rank {op.frm}: {_next(schedule, ranks, op.frm, receiving=False)}"
    on_wire = [index for index, op in enumerate(schedule.programs[number]) if not isinstance(op, Compute)]
    return ScheduleError(f"{schedule.op} cannot finish: rank {number}: {why}", schedule, number, on_wire[at])


def _next(schedule: Schedule, ranks: list[Standing], number: int, *, receiving: bool) -> str:
    """What rank ``number`` would receive (or send) next."""
    rank, program = ranks[number], schedule.programs[number]
    index = rank.received if receiving else rank.sent
    if index == len(rank.wire):
        through = rank.next_op == len(program)
        return f"rank {number} " + ("has posted nothing more" if through else f"stands before {program[rank.next_op]}")
    op = rank.wire[index]
    if isinstance(op, Collective):
        return f"rank {number} is at {op.kind}"
    if receiving:
        return f"rank {number} next receives {op.recv} from rank {op.frm}"
    return f"rank {number} next sends {op.send} to rank {op.to}"
