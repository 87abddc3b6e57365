"""How long the busiest wire is busy at the least, whatever the order and the way that pieces take."""

from __future__ import annotations

from collections import defaultdict

from .alike import alike_after
from .flow import BLOCK
from .machine import Machine
from .schedule import Exchange, Schedule


def least_wire_seconds(direct: Schedule, machine: Machine) -> float:
    """Seconds of the busiest wire in its busier direction, at its bandwidth and without latencies.

    Args:
        direct: the schedule in which every piece goes straight from the rank that has it to each that needs it. That is
            the least for the wire of a rank. Not so for that of a node: a gathered piece has to come to it once and
            not once for each of its ranks, and has to leave its own node once; of partial sums the sum does.
    """
    n, ports = direct.ranks, max(1, min(machine.ports, direct.ranks - 1))
    busy: defaultdict[tuple[str, int], float] = defaultdict(float)
    for rank in range(alike_after(direct, machine)):
        bytes_per_s = machine.link_of(rank).bytes_per_s * ports
        for op in direct.programs[rank]:
            if not isinstance(op, Exchange):
                continue
            sent, received = direct.size(op.send).bytes, direct.size(op.recv).bytes
            busy["out", rank] += sent / bytes_per_s
            busy["in", rank] += received / bytes_per_s
            if machine.uplink is None or not machine.node_of:
                continue
            node = machine.node_of[rank]
            inside, outside = machine.nodes[node], n - machine.nodes[node]
            out_of, into = (inside, outside) if "@" in op.recv else (outside, inside)  # partial sums, or pieces
            if BLOCK.match(op.send):
                out_of = into = 1
            if machine.crosses(rank, op.to):
                busy["out of node", node] += sent / machine.uplink.bytes_per_s / out_of
            if machine.crosses(op.frm, rank):
                busy["into node", node] += received / machine.uplink.bytes_per_s / into
    return max(busy.values(), default=0.0)
