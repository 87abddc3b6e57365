"""What a group's wire and its ranks' arithmetic cost, measured by all ranks together, as one Machine.

[Note: one machine] Every rank measures, at the same time as the others, since what they share (cores, memory, a switch)
they share in a real step as well. All numbers go to all ranks, and each makes the same Machine of them: that of the
slowest rank. What is agreed on is the numbers, so the Machine has the same bits everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch

from ..machine import Link, Machine
from ..matmul import Matmul
from . import wire, work
from .steps import Steps, steps_of
from .wire import Partners, Wire, gathered

_ALIKE = 0.75  # wires of which the slowest has this share of the fastest's rate are taken to be alike
_BURST_PART = 8  # a burst is told from a transfer of this part of the step's
SHAPE = (128, 1024, 1024)
_SHORT = (64, 512, 512)  # a matmul that takes some times as long as a message
_MATRICES = 4
_SMALL_RUNS = 15


def measure(transport: Any, dtype: torch.dtype, device: torch.device, nodes: Sequence[int] = ()) -> Machine:
    """The machine that the ranks of a transport make up; takes about two seconds. Collective.

    Args:
        transport: of the group; of one rank alone only the arithmetic is measured.
        dtype: of the matmuls.
        device: where tensors are.
        nodes: ranks per node, where nodes share a wire; () where every rank has a wire of its own to all others.
    """
    matmul, short = _matmul(transport, dtype, device), work.product_of(*_SHORT, dtype, device)
    if transport.world_size == 1:
        return Machine(Link(0.0, float("inf")), issue_s=steps_of(transport, device, 0.0, short).issue_s, matmul=matmul)
    timed = Wire(transport, device)
    near = wire.inside(transport.rank, nodes or (transport.world_size,), 1)
    found = _links(timed, transport, nodes)
    steps = Steps(*_longest(transport, steps_of(transport, device, found.link.latency_s, short)))
    where = {"nodes": tuple(nodes), "uplink": found.uplink, "links": found.links}
    machine = Machine(found.link, **steps._asdict(), matmul=matmul, **where)
    return replace(
        machine,
        contention=_contention(timed, transport, near, found.step, work.product_of(*SHAPE, dtype, device), device),
        **_collectives(transport, machine, short, device)._asdict(),
    )


def _matmul(transport: Any, dtype: torch.dtype, device: torch.device) -> Matmul:
    """What computing costs, as on the slowest rank."""
    products, memory = work.matmul_seconds(dtype, device), work.memory_bytes_per_s(dtype, device)
    own = [1 / memory, work.activation_s(dtype, device, memory), *work.attention_seconds(dtype, device)]
    (per_byte_s, activation_s, *attention), seconds = (
        _longest(transport, each) for each in (own, list(products.values()))
    )
    matmul = work.matmul_of(dict(zip(products, seconds, strict=True)), 1 / per_byte_s)
    return work.with_attention(replace(matmul, activation_s=activation_s), attention, dtype.itemsize)


class _Links(NamedTuple):
    """What the wires turned out to be; ``step`` is the size of a transfer that takes some while inside a node."""

    link: Link
    links: tuple[Link, ...]
    uplink: Link | None
    step: int


def _links(timed: Wire, transport: Any, nodes: Sequence[int]) -> _Links:
    """The wire of every rank inside its node (or to all others), and that between nodes."""
    counts = nodes or (transport.world_size,)
    near, *others = (wire.inside(transport.rank, counts, shift) for shift in (1, 2, 3) if shift < max(counts))
    step = timed.step_bytes(near)
    rate = max(timed.rate(partners, step) for partners in (near, *others))  # its own, not that of a slow partner
    empty_s, *rates = _of_all(transport, near, timed.empty_s(near), rate)
    slowest = min(rates)
    burst = timed.burst_bytes(near, max(1, step // _BURST_PART), empty_s, slowest)
    burst = median(theirs for (theirs,) in gathered(transport, [burst]))
    sizes, seconds = timed.sizes(near, step, slowest)
    longest = _longest(transport, seconds)
    latency_s = min(empty_s, *longest)  # what it takes to be told of a transfer holds up no other
    link = Link(latency_s, slowest, tuple(zip(sizes, longest, strict=True)), burst)
    uneven = slowest < _ALIKE * max(rates) and not nodes
    links = tuple(Link(latency_s, bytes_per_s, (), burst) for bytes_per_s in rates) if uneven else ()
    return _Links(link, links, _uplink(timed, transport, nodes) if nodes else None, step)


def _uplink(timed: Wire, transport: Any, nodes: Sequence[int]) -> Link:
    """The wire between nodes, by one transfer each way at a time."""
    far = wire.between(transport.rank, nodes)
    step = timed.step_bytes(far)
    empty_s, *rates = _of_all(transport, far, timed.empty_s(far), timed.rate(far, step))
    return Link(empty_s, min(rates))


def _of_all(transport: Any, partners: Partners, empty_s: float, bytes_per_s: float) -> list[float]:
    """The longest empty exchange and all rates, of those ranks that have partners."""
    own = [empty_s, bytes_per_s, float(partners.to != transport.rank)]
    taking_part = [theirs for theirs in gathered(transport, own) if theirs[2]]
    return [max(theirs[0] for theirs in taking_part), *(theirs[1] for theirs in taking_part)]


def _longest(transport: Any, own: Sequence[float]) -> list[float]:
    """Of each of some numbers that of the slowest rank."""
    return list(map(max, zip(*gathered(transport, own), strict=True)))


def _contention(
    timed: Wire, transport: Any, near: Partners, step: int, multiply: Callable[[], object], device: torch.device
) -> float:
    """By how much matmuls are slower while the wire is busy: a small difference, so the median of the ranks."""

    def each_s() -> float:
        start_s, calls = time.perf_counter(), 0
        while calls < _MATRICES or time.perf_counter() - start_s < wire.STEP_S:
            multiply()
            calls += 1
        wire.synchronize(device)
        return (time.perf_counter() - start_s) / calls

    slower = []
    for _ in range(3):
        gathered(transport, [])
        alone_s = each_s()
        tickets = timed.start(near, [step] * 2)
        slower.append(each_s() / alone_s - 1)
        for ticket in tickets:
            ticket.wait()
    return max(0.0, median(theirs for (theirs,) in gathered(transport, [median(slower)])))


class _Collectives(NamedTuple):
    """What the backend's own collectives cost, by the names that the machine has for it."""

    collective_efficiency: float
    collective_fixed_s: float


def _collectives(
    transport: Any, machine: Machine, multiply: Callable[[], object], device: torch.device
) -> _Collectives:
    """What collectives take beside latencies after a matmul: next to nothing moved, by the slowest kind, and much."""
    rounds = transport.world_size - 1
    bytes_per_s = 1 / machine.collective_s(0, 1)
    count = int(min(wire.MOST_BYTES, max(4, wire.STEP_S / 2 * bytes_per_s)) / (4 * rounds)) or 1
    beside_s = machine.collective_s(rounds, 1) + machine.notice_s  # posting is quick while nothing else wants the core
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    gather_s, scatter_s, both_s = _seconds_of_collectives(transport, kinds, 1, _SMALL_RUNS, multiply, device)
    fixed_s = max(0.0, max(gather_s, scatter_s, both_s / 2) - beside_s)
    wire_s = machine.collective_s(0, 4 * count * rounds)
    gather_s, scatter_s = _seconds_of_collectives(transport, kinds[:2], count, 3, multiply, device)
    return _Collectives(wire_s / max(wire_s, (gather_s + scatter_s) / 2 - beside_s - fixed_s), fixed_s)


def _seconds_of_collectives(
    transport: Any, kinds: Sequence[str], count: int, runs: int, multiply: Callable[[], object], device: torch.device
) -> list[float]:
    """Seconds of collectives of each kind, ``count`` numbers a piece, on the slowest rank."""
    pieces = [torch.zeros(count, dtype=torch.float32, device=device) for _ in range(transport.world_size)]
    sums = [torch.zeros_like(piece) for piece in pieces]
    own, summed = [pieces[transport.rank]], [sums[transport.rank]]
    tensors = {"all_gather": (own, pieces), "reduce_scatter": (pieces, summed), "all_reduce": (pieces, sums)}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(runs):
        for kind in kinds:
            gathered(transport, [])
            multiply()
            start_s = time.perf_counter()
            transport.collective(kind, *tensors[kind]).wait()
            wire.synchronize(device)
            seconds[kind].append(time.perf_counter() - start_s)
    return _longest(transport, list(map(median, seconds.values())))
