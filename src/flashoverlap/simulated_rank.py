"""Where one rank of a simulation stands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .schedule import Collective, Compute, Exchange, Program


@dataclass(slots=True, eq=False)
class SimulatedRank:
    """Where one rank stands: in its program, and on its wire.

    [Note: one index for both directions] Every wire operation is one send and one receive (or a collective), so its
    place in ``wire`` numbers both. Sends and receives advance independently, each in order.
    """

    number: int
    program: Program
    next_op: int = 0  # index of the operation to issue next
    issued: bool = False  # whether its issue has been paid for
    unread: Iterator[str] | None = None  # what the next Compute reads and has not been waited for yet
    waits_for: int = -1  # index on the wire of what the program waits for
    running: Compute | None = None
    started_s: float = 0.0  # when the running Compute, or the wait, began
    finished: bool = False
    wire: list[Exchange | Collective] = field(default_factory=list)
    sent: int = 0  # how many have started to leave
    received: int = 0  # how many have started to come
    leaving: int = 0  # how many are in flight
    arriving: int = 0
    arrived: bytearray = field(default_factory=bytearray)
    latest: dict[str, int] = field(default_factory=dict)  # buffer -> index on the wire of its last posted receive
    needs: dict[int, int] = field(default_factory=dict)  # a send that hands on -> the receive that it waits for
    at_collective: bool = False
    left_s: float = 0.0  # work left of the running Compute as of since_s (only kept up with contention)
    since_s: float = 0.0
    slowness: float = 1.0
    version: int = 0  # counts reschedulings; an event of an older one is void
    compute_s: float = 0.0
    blocked_s: float = 0.0
    ended_s: float = 0.0
