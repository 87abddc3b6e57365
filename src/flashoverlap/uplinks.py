"""Transfers between nodes that share the uplinks of their nodes, and how fast each goes at a time.

Those that leave a node divide its bandwidth equally, and so do those that come to one; the fewer of the two that a
transfer gets is its pace, unless its own ranks' wires are slower still. It changes whenever one begins or ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from .machine import Machine


@dataclass(slots=True, eq=False)
class Crossing:
    """One transfer between nodes: ``send`` from rank ``sender`` to ``recv`` on rank ``target``.

    ``place`` says where it arrives: the rank that stands for the target and the number of the receive on its wire.
    """

    sender: int
    target: int
    place: tuple[int, int]
    send: str
    recv: str
    nbytes: int
    start_s: float
    since_s: float = 0.0  # when its pace changed last
    left: float = 1.0  # share of it that was still to come then
    takes_s: float = 0.0  # what all of it takes at this pace
    ends_s: float = -1.0
    beside: tuple[dict[Crossing, None], ...] = ()  # all that leave the same node, and all that come to the same


class Uplinks:
    """What is under way between nodes; the first ``period`` ranks stand for all.

    Many transfers begin and end at one time, so paces are worked out anew once for all of them: :meth:`enter` and
    :meth:`leave` say whether :meth:`repaced` is to be called before the clock moves on.
    """

    def __init__(self, machine: Machine, period: int) -> None:
        self._machine, self._period = machine, period
        nodes = range(len(machine.nodes))
        # as dicts, which keep the order: leaving each node, and coming to it
        self._out: list[dict[Crossing, None]] = [{} for _ in nodes]
        self._in: list[dict[Crossing, None]] = [{} for _ in nodes]
        self._under_way: dict[tuple[int, int], Crossing] = {}
        self._changed: dict[int, dict[Crossing, None]] = {}  # since the last repacing, by identity
        self._takes_s: dict[tuple[int, int], float] = {}  # by bytes and sharing, where ranks have one kind of wire

    def enter(self, crossing: Crossing) -> bool:
        """Begins a transfer."""
        node_of = self._machine.node_of
        crossing.beside = self._out[node_of[crossing.sender]], self._in[node_of[crossing.target % self._period]]
        for shared in crossing.beside:
            shared[crossing] = None
        self._under_way[crossing.place] = crossing
        return self._change(crossing)

    def leave(self, place: tuple[int, int], now: float) -> tuple[Crossing | None, bool]:
        """Ends the transfer that arrives at ``place`` if this is the time, and returns it."""
        crossing = self._under_way.get(place)
        if crossing is None or crossing.ends_s != now:
            return None, False
        del self._under_way[place]
        for shared in crossing.beside:
            del shared[crossing]
        return crossing, self._change(crossing)

    def repaced(self, now: float) -> list[Crossing]:
        """All transfers that now end at another time than before."""
        others = {crossing: None for shared in self._changed.values() for crossing in shared}
        self._changed.clear()
        return [crossing for crossing in others if self._repace(crossing, now)]

    def _change(self, crossing: Crossing) -> bool:
        first = not self._changed
        for shared in crossing.beside:
            self._changed[id(shared)] = shared
        return first

    def _repace(self, crossing: Crossing, now: float) -> bool:
        takes_s = self._seconds(crossing, max(map(len, crossing.beside)))
        if takes_s == crossing.takes_s and crossing.ends_s >= 0:
            return False
        if crossing.takes_s:
            crossing.left = max(0.0, crossing.left - (now - crossing.since_s) / crossing.takes_s)
        crossing.since_s, crossing.takes_s = now, takes_s
        crossing.ends_s = now + crossing.left * takes_s
        return True

    def _seconds(self, crossing: Crossing, sharing: int) -> float:
        if self._machine.links:
            return self._machine.transfer_s(crossing.nbytes, crossing.sender, crossing.target, sharing)
        key = (crossing.nbytes, sharing)
        seconds = self._takes_s.get(key)
        if seconds is None:
            seconds = self._machine.transfer_s(crossing.nbytes, crossing.sender, crossing.target, sharing)
            self._takes_s[key] = seconds
        return seconds
