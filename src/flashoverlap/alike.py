"""Which ranks of a schedule do the same at the same time, so that one of them stands for all.

[Note: ranks alike] Adding ``period`` to every rank and piece turns the programs into themselves. If the machine does
not tell ranks that far apart from each other either, they run alike: whatever happens on rank r at some time happens on
rank r + period at that time. So the first ``period`` ranks are replayed, and any other rank is looked up as the one
that it is alike to. What is left to see is that a transfer is matched as it would be among all ranks. Where exchange k
of every rank is a round, sent to and received from ranks for which it is exchange k too, a rank has received from any
other as many as that has sent to it or to those alike, so the next send of one and the next receive of the other belong
together if and only if the ranks that stand for them say so.
"""

from __future__ import annotations

from math import lcm

from .machine import Machine
from .schedule import Compute, Exchange, Program, Programs, Schedule


def alike_after(schedule: Schedule, machine: Machine) -> int:
    """The period p for which ranks r and r + p are alike on this machine; the number of ranks where none are."""
    n, programs = schedule.ranks, schedule.programs
    if not isinstance(programs, Programs) or len(set(machine.links)) > 1 or len(set(machine.nodes)) > 1:
        return n
    period = programs.period
    if machine.uplink is not None and len(machine.nodes) > 1:
        period = lcm(period, machine.nodes[0])
    return period if n % period == 0 and _in_rounds(programs[:period], n) else n


def _in_rounds(first: tuple[Program, ...], ranks: int) -> bool:
    """Whether every exchange is number k on both sides, told by the programs of the first ranks."""
    period = len(first)
    wires = [[op for op in program if not isinstance(op, Compute)] for program in first]
    for rank, wire in enumerate(wires):
        if len(wire) != len(wires[0]):
            return False
        for number, op in enumerate(wire):
            if not isinstance(op, Exchange):
                if any(isinstance(other[number], Exchange) for other in wires):
                    return False
                continue
            theirs = wires[op.to % period][number]
            if not isinstance(theirs, Exchange) or (theirs.frm + op.to - op.to % period - rank) % ranks:
                return False
    return True
