"""Which rank is on which node, and which wires lie between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

from flashoverlap.lab.bucket import packet_bytes
from flashoverlap.lab.link import Link

MAX_RANKS = 250  # As many descriptors as one message can carry (253), less the switch and the user namespace.


class Port(NamedTuple):
    """One end of a wire: what leaves through it is limited.

    ``rank`` has it in its own namespace, or None for the switches'; ``name`` is without the lab's own prefix.
    """

    rank: int | None
    name: str
    link: Link
    behind_another: bool


@dataclass(frozen=True)
class Topology:
    """Ranks, each on a link of its own to its node's switch; nodes, each on one uplink, which its ranks share.

    Attributes:
        ranks: how many.
        link: of each rank.
        nodes: how many; neighbours in rank share one, as evenly as may be.
        uplink: of each node to the others; None where there is one node.
    """

    ranks: int
    link: Link
    nodes: int = 1
    uplink: Link | None = None

    @staticmethod
    def parse(ranks: int, link: str | None, nodes: int = 1, uplink: str | None = None) -> Topology | None:
        """Checks and reads the arguments of a lab; None where there is no link, so plain loopback.

        Raises:
            ValueError: a number out of range, a rate that is not understood, nodes without an uplink, or the reverse.
        """
        rate, between = Link.parse(link), Link.parse(uplink)
        if not 1 <= ranks <= MAX_RANKS:
            raise ValueError(f"a lab has 1 to {MAX_RANKS} ranks, not {ranks}")
        if not 1 <= nodes <= ranks:
            raise ValueError(f"ranks {ranks} can be on 1 to {ranks} nodes, not {nodes}")
        if nodes > 1 and (rate is None or between is None):
            raise ValueError(f"nodes {nodes} need a link and an uplink with a rate, not {link!r} and {uplink!r}")
        if nodes == 1 and between is not None:
            raise ValueError(f"uplink {uplink!r} goes between nodes, and there is one: give nodes 2 or more")
        return None if rate is None else Topology(ranks, rate, nodes, between)

    @property
    def links(self) -> tuple[Link, ...]:
        """The kinds of wires."""
        return (self.link,) if self.uplink is None else (self.link, self.uplink)

    @property
    def packet_bytes(self) -> int:
        """The packet size of the whole lab: see [Note: one packet size] in bucket.py."""
        return packet_bytes(min(rate for link in self.links for rate in link.rates))

    def ports(self) -> Iterator[Port]:
        """Every end of every wire."""
        for rank in range(self.ranks):
            yield Port(rank, "", self.link, False)
            yield Port(None, f"p{rank}", self.link, True)
        if self.uplink is not None:
            for node in range(self.nodes):
                yield Port(None, f"u{node}", self.uplink, False)
                yield Port(None, f"d{node}", self.uplink, True)

    def to_json(self) -> str:
        """The topology as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Topology:
        """Reads what :meth:`to_json` wrote."""
        read = json.loads(text)
        link, uplink = (
            Link(one["bytes_per_s"], tuple(map(tuple, one["changes"]))) if one else None
            for one in (read["link"], read["uplink"])
        )
        assert link is not None
        return Topology(read["ranks"], link, read["nodes"], uplink)


def node_of(rank: int, ranks: int, nodes: int) -> tuple[int, int, int]:
    """The node of a rank, its place on it, and how many ranks are there; the first nodes take one more."""
    small, larger = divmod(ranks, nodes)
    start = 0
    for node in range(nodes):
        size = small + (node < larger)
        if rank < start + size:
            return node, rank - start, size
        start += size
    raise ValueError(f"rank {rank} is none of {ranks}")
