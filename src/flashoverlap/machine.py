"""What a schedule runs on: how long a kernel, a transfer and a collective take, as measured or guessed numbers.

Nothing here knows of a schedule. :func:`flashoverlap.simulate.simulate` replays a schedule on a machine, and
calibration fills a machine in from measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from .matmul import Attention, Matmul, Product, check_number


@dataclass(frozen=True)
class Kernel:
    """A kernel's cost: ``fixed_s`` seconds a call, ``seconds_per_row`` for each row that it reads, and its matmuls.

    Raises:
        ValueError: a cost is negative or not finite.
    """

    fixed_s: float = 0.0
    seconds_per_row: float = 0.0
    products: tuple[Product, ...] = ()
    attention: Attention | None = None

    def __post_init__(self) -> None:
        check_number("fixed_s", self.fixed_s)
        check_number("seconds_per_row", self.seconds_per_row)

    def seconds(self, rows: int) -> float:
        """Seconds of one call on ``rows`` rows."""
        seconds = self.fixed_s + rows * self.seconds_per_row
        if self.attention is not None:
            seconds += self.attention.seconds(rows)
        return seconds + sum(product.seconds(rows) for product in self.products) if self.products else seconds


@dataclass(frozen=True)
class Link:
    """A wire, in each direction by itself: a transfer takes ``latency_s + bytes / bytes_per_s``, or what was measured.

    Args:
        latency_s: of every transfer, however small.
        bytes_per_s: what is reached by large transfers.
        sizes: ``(bytes, seconds)`` of measured transfers by ascending size, which then hold instead. Between two sizes
            seconds are interpolated; a smaller transfer lies between ``latency_s`` and the smallest, and what a larger
            one has more than the largest goes at ``bytes_per_s``.
        burst_bytes: bytes that a wire out of a rank passes at once when it has been idle long enough, as a token bucket
            does; between nodes it is no matter.

    Raises:
        ValueError: a negative latency, a bandwidth that is not above 0 (infinite is allowed), or sizes out of order.
    """

    latency_s: float
    bytes_per_s: float
    sizes: tuple[tuple[int, float], ...] = ()
    burst_bytes: float = 0

    def __post_init__(self) -> None:
        check_number("latency_s", self.latency_s)
        check_number("bytes_per_s", self.bytes_per_s, positive=True, infinite=True)
        check_number("burst_bytes", self.burst_bytes)
        if self.burst_bytes and math.isinf(self.bytes_per_s):
            raise ValueError("an infinite bandwidth has no burst")
        for nbytes, seconds in self.sizes:
            check_number("bytes of a measured transfer", nbytes, positive=True)
            check_number("seconds of a measured transfer", seconds)
        if any(first[0] >= second[0] for first, second in pairwise(self.sizes)):
            raise ValueError(f"measured transfers must come by ascending size, not {[size for size, _ in self.sizes]}")
        object.__setattr__(self, "sizes", tuple((nbytes, seconds) for nbytes, seconds in self.sizes))

    def seconds(self, nbytes: float) -> float:
        """Seconds of one transfer alone on the wire; nothing to move costs nothing."""
        if not nbytes:
            return 0.0
        if not self.sizes:
            return self.latency_s + nbytes / self.bytes_per_s
        low, low_s = 0, min(self.latency_s, self.sizes[0][1])
        for high, high_s in self.sizes:
            if nbytes <= high:
                return low_s + (high_s - low_s) * (nbytes - low) / (high - low)
            low, low_s = high, high_s
        return low_s + (nbytes - low) / self.bytes_per_s


@dataclass(frozen=True)
class Machine:
    """The ranks' kernels, alike on all of them, and their wires. Hashable, so that what is planned can be cached.

    Args:
        link: the wire of every rank; a transfer holds that of its sender and that of its receiver.
        kernels: cost of each kernel by its name in the schedule (``mm``, ``up``, ``down``, ``wgrad``, ...).
        add: cost of adding one buffer onto another, its rows counted; free unless given.
        ports: transfers of a rank that may be in flight at once in each direction, each at the full ``bytes_per_s``.
        contention: a kernel runs ``1 + contention`` times slower while the rank's wire is busy in either direction.
        issue_s: what issuing one operation costs the program, whatever the operation is.
        post_s: what an exchange or a collective costs the program beyond that, which hands it to others to carry out.
        notice_s: from the end of a transfer until its ranks know of it, since who waits has to be woken. Meanwhile the
            wire goes on, and so does a program that does not wait.
        collective_efficiency: share of ``bytes_per_s`` that the backend's own collectives reach.
        collective_fixed_s: what one of them takes beyond that and the latencies, however little it moves.
        matmul: what a matmul of any shape takes; the planner makes kernels of it that ``kernels`` does not have.
        nodes: how many ranks each node has, in the order of the ranks; all in one node unless given.
        uplink: what a node's ranks share for all that leaves the node, and for all that comes to it: its numbers are
            those of a transfer between nodes that is alone, and several at once divide its bandwidth equally.
        links: the wire of each rank, where they differ; instead of ``link``.

    Raises:
        ValueError: a number is out of its range, ``kernels`` holds something that is no Kernel, or ``uplink`` is given
            without ``nodes``.
    """

    link: Link
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    add: Kernel = field(default_factory=Kernel)
    ports: int = 1
    contention: float = 0.0
    issue_s: float = 0.0
    post_s: float = 0.0
    notice_s: float = 0.0
    collective_efficiency: float = 1.0
    collective_fixed_s: float = 0.0
    matmul: Matmul | None = None
    nodes: tuple[int, ...] = ()
    uplink: Link | None = None
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        for name, kernel in self.kernels.items():
            if not isinstance(kernel, Kernel):
                raise ValueError(f"kernel {name!r} must be a Kernel, not {kernel!r}")
        if not isinstance(self.ports, int) or self.ports < 1:
            raise ValueError(f"ports must be a whole number of 1 or more, not {self.ports!r}")
        for name in ("contention", "issue_s", "post_s", "notice_s", "collective_fixed_s"):
            check_number(name, getattr(self, name))
        check_number("collective_efficiency", self.collective_efficiency, positive=True)
        for count in self.nodes:
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"nodes must have one rank or more each, not {self.nodes!r}")
        if self.uplink is not None and not self.nodes:
            raise ValueError("an uplink is what a node's ranks share: nodes=(ranks of the first, ...) goes with it")
        object.__setattr__(self, "kernels", dict(self.kernels))  # the caller's own may change; a hashed one may not
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "links", tuple(self.links))

    @cached_property
    def _hash(self) -> int:
        kernels = frozenset(self.kernels.items())
        steps = (self.ports, self.contention, self.issue_s, self.post_s, self.notice_s)
        collective = (self.collective_efficiency, self.collective_fixed_s)
        return hash((self.link, kernels, self.add, steps, collective, self.matmul, self.nodes, self.uplink, self.links))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        # without the hash, since that of a string differs between processes
        return {name: value for name, value in self.__dict__.items() if name in self.__dataclass_fields__}

    def kernel(self, name: str) -> Kernel:
        """The kernel called ``name``; raises ValueError, with the names known, where there is none."""
        if name not in self.kernels:
            known = ", ".join(sorted(self.kernels)) or "none"
            raise ValueError(f"this machine has no kernel {name!r}; known: {known}")
        return self.kernels[name]

    def with_kernels(self, kernels: Mapping[str, Kernel], add: Kernel) -> Machine:
        """The same machine with these kernels where it has none of that name, and this cost of an addition."""
        return replace(self, kernels={**kernels, **self.kernels}, add=add)

    def check_ranks(self, ranks: int) -> None:
        """Raises ValueError where the nodes, or the links, are those of another number of ranks."""
        for what, count in (("nodes hold", sum(self.nodes)), ("links are of", len(self.links))):
            if count not in (0, ranks):
                raise ValueError(f"the {what} {count} ranks, and there are {ranks}")

    def link_of(self, rank: int) -> Link:
        """The wire of ``rank``."""
        return self.links[rank] if self.links else self.link

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """The node of each rank; empty where all are in one."""
        return tuple(node for node, count in enumerate(self.nodes) for _ in range(count)) if self.uplink else ()

    def crosses(self, source: int, target: int) -> bool:
        """Whether a transfer from rank ``source`` to rank ``target`` goes from node to node."""
        return bool(self.node_of) and self.node_of[source] != self.node_of[target]

    def transfer_s(self, nbytes: int, source: int = 0, target: int = 0, sharing: int = 1) -> float:
        """Seconds that one transfer holds the wires of rank ``source`` and rank ``target``.

        Args:
            nbytes: what is moved; nothing to move costs nothing.
            sharing: how many transfers divide the uplink, this one counted; no matter inside a node.
        """
        if not nbytes:
            return 0.0
        seconds = self.link_of(source).seconds(nbytes)
        if self.links:
            seconds = max(seconds, self.links[target].seconds(nbytes))
        if self.uplink is not None and self.crosses(source, target):
            latency_s = self.uplink.latency_s
            seconds = max(seconds, latency_s + sharing * (self.uplink.seconds(nbytes) - latency_s))
        return seconds

    def collective_s(self, rounds: int, nbytes: float, sharing: float = 1.0) -> float:
        """Seconds of a backend's collective that takes ``rounds`` latencies and moves ``nbytes`` through a rank, at the
        pace of the slowest wire; ``sharing``: how often what a rank moves goes through the uplink of a node."""
        if not nbytes:
            return 0.0
        wires = self.links or (self.link,)
        latency_s = max(wire.latency_s for wire in wires)
        bytes_per_s = min(wire.bytes_per_s for wire in wires)
        if self.uplink is not None and len(self.nodes) > 1:
            latency_s = max(latency_s, self.uplink.latency_s)
            bytes_per_s = min(bytes_per_s, self.uplink.bytes_per_s / sharing)
        return rounds * latency_s + nbytes / (bytes_per_s * self.collective_efficiency)
