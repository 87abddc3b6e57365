"""A cluster as an estimate sees it: one rank's arithmetic and memory, and the wires between any group of its ranks."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from ..machine import Link, Machine
from ..matmul import Matmul
from .published import Assumed, Published


@dataclass(frozen=True)
class Cluster:
    """Any number of ranks alike.

    Args:
        name: what it is called.
        source: where its figures are from.
        machine: ranks of one node: their wire, and the matmul of each.
        memory_bytes: of one rank; None where it is not known.
        node_ranks: ranks of a node; 0 for all.
        uplink: what one rank has of the wire between nodes; None where there is one node.
        mesh: inside a node each rank has a wire to each other one, and not one to a switch.
        assumed: what the figures owe to assumptions; None where they are measured.
    """

    name: str
    source: str
    machine: Machine
    memory_bytes: float | None
    node_ranks: int = 0
    uplink: Link | None = None
    mesh: bool = False
    assumed: Assumed | None = None

    @property
    def matmul(self) -> Matmul:
        """A rank's matmul; every cluster has one."""
        assert self.machine.matmul is not None
        return self.machine.matmul

    @property
    def peak_flops_per_s(self) -> float:
        """Of one rank: what an MFU of 1 would reach."""
        return self.matmul.flops_per_s

    def group(self, size: int, stride: int = 1) -> Machine:
        """The machine that a group of every ``stride``-th rank is, where all groups like it are busy at once.

        A group that is spread over nodes has of each node's wires what its ranks there bring: the others' are taken
        by the other groups.
        """
        counts = self._ranks_by_node(size, stride)
        if self.uplink is None or len(counts) == 1:
            return self._in_a_node(size)
        if max(counts) == 1:
            return replace(self.machine, link=self.uplink, ports=1)
        shared = replace(self.uplink, bytes_per_s=self.uplink.bytes_per_s * min(counts))
        return replace(self._in_a_node(max(counts)), nodes=counts, uplink=shared)

    def crosses_nodes(self, size: int, stride: int = 1) -> bool:
        """Whether such a group is spread over nodes."""
        return self.uplink is not None and len(self._ranks_by_node(size, stride)) > 1

    def _in_a_node(self, size: int) -> Machine:
        if not self.mesh or size < 2:
            return self.machine
        wires = size - 1  # a collective uses the wires to all ranks of the group
        return replace(self.machine, ports=wires, collective_efficiency=wires)

    def _ranks_by_node(self, size: int, stride: int) -> tuple[int, ...]:
        """Ranks of the group in each node that it touches; of all groups like it, the one that touches most."""
        per_node, span = self.node_ranks or size * stride, size * stride
        even = per_node % span == 0 or (span % per_node == 0 and (per_node % stride == 0 or stride % per_node == 0))
        starts = (0,) if even else range(0, math.lcm(per_node, span), span)
        groups = [Counter((start + index * stride) // per_node for index in range(size)) for start in starts]
        widest = max(groups, key=len)
        return tuple(widest[node] for node in sorted(widest))


def published_cluster(published: Published, dtype: str) -> Cluster:
    """The cluster of a published device.

    Raises:
        ValueError: no figure is published for ``dtype``.
    """
    if dtype not in published.flops_per_s:
        known = ", ".join(published.flops_per_s)
        raise ValueError(f"{published.name} has no published figure for {dtype}; it has {known}")
    assumed, peak = published.assumed, published.flops_per_s[dtype]
    memory = published.memory_bytes_per_s * assumed.memory
    matmul = Matmul(peak, assumed.kernel_s, memory, ((1, 1, 1, assumed.matmul),))
    link = Link(assumed.latency_s, published.link_bytes_per_s * assumed.wire)
    machine = Machine(link, matmul=matmul, contention=assumed.contention, issue_s=assumed.issue_s)
    return Cluster(
        published.name,
        published.source,
        machine,
        published.memory_bytes,
        published.node_ranks,
        Link(assumed.uplink_latency_s, published.uplink_bytes_per_s * assumed.wire),
        published.links > 1,
        assumed,
    )


def measured_cluster(machine: Machine, name: str, source: str = "measured") -> Cluster:
    """The cluster whose ranks are those of a calibrated machine, the slowest of its wires for all.

    Raises:
        ValueError: the machine has no matmul of every shape.
    """
    matmul = machine.matmul
    if matmul is None:
        raise ValueError(f"{name} says nothing of matmuls of other shapes; calibrate again")
    link = min(machine.links, key=lambda link: link.bytes_per_s) if machine.links else machine.link
    node_ranks = max(machine.nodes, default=0)
    uplink = machine.uplink and replace(machine.uplink, bytes_per_s=machine.uplink.bytes_per_s / node_ranks)
    return Cluster(
        name,
        source,
        replace(machine, link=link, links=(), nodes=(), uplink=None),
        None,
        node_ranks,
        uplink,
    )
