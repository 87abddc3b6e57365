"""How long the busiest wire is busy at the least, whatever the order and the way that pieces take."""

from __future__ import annotations

from collections import defaultdict

from .alike import alike_after
from .flow import BLOCK
from .machine import Link, Machine
from .schedule import Exchange, Schedule


def least_wire_seconds(direct: Schedule, machine: Machine) -> float:
    """Seconds of the busiest wire in its busier direction, at its bandwidth, without latencies and after a first burst.

    Args:
        direct: the schedule in which every piece goes straight from the rank that has it to each that needs it. That is
            the least for the wire of a rank. Not so for that of a node: a gathered piece has to come to it once and
            not once for each of its ranks, and has to leave its own node once; of partial sums the sum does.
    """
    n, ports = direct.ranks, machine.ports
    busy: defaultdict[tuple[str, int], float] = defaultdict(float)
    for rank in range(alike_after(direct, machine)):
        bytes_per_s = _fastest(machine.link_of(rank)) * ports
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
                busy["out of node", node] += sent / _fastest(machine.uplink) / out_of
            if machine.crosses(op.frm, rank):
                busy["into node", node] += received / _fastest(machine.uplink) / into
    bursts = [link.burst_bytes / link.bytes_per_s for link in map(machine.link_of, range(n))]
    for (way, rank), seconds in busy.items():
        if way in ("out", "in"):
            others = sum(bursts) - bursts[rank]
            busy[way, rank] = max(0.0, seconds - (bursts[rank] if way == "out" else others) / ports)
    return max(busy.values(), default=0.0)


def least_seconds_in_parts(direct: Schedule, machine: Machine, parts: int, compute_s: float) -> float:
    """Seconds that one rank needs at the least where every piece is cut into ``parts``: for its messages, latencies
    counted, and for its kernels, which take ``compute_s`` uncut, beside posting them.

    Args:
        direct: the schedule in which no piece is cut and every piece goes straight to who needs it.
    """
    sent = sum(isinstance(op, Exchange) for op in direct.programs[0])
    posting_s = parts * sent * (machine.issue_s + machine.post_s)
    return max(message_seconds(direct, machine, parts), compute_s + posting_s)


def message_seconds(direct: Schedule, machine: Machine, parts: int = 1) -> float:
    """Seconds that the messages of the rank with the slowest wire take where every piece is cut into ``parts``."""
    rank = min(range(direct.ranks), key=lambda rank: machine.link_of(rank).bytes_per_s)
    link = machine.link_of(rank)
    sent = [direct.size(op.send).bytes for op in direct.programs[rank] if isinstance(op, Exchange)]
    messages_s = parts * sum(link.seconds(nbytes / parts) for nbytes in sent)
    return (messages_s - link.burst_bytes / link.bytes_per_s) / machine.ports


def _fastest(link: Link) -> float:
    """Bytes a second of the transfers that make the most of a wire, which may be some of those that were measured."""
    return max(link.bytes_per_s, *(nbytes / seconds for nbytes, seconds in link.sizes if seconds), 0.0)
