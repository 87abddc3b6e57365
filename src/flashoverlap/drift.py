"""When to look at the wire again: calls that take another time than they used to, and what to do where that is so."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from .machine import Link, Machine

# [Note: never flapping] A call is compared with what calls of its kind took after the last look, whatever was
# predicted, so a prediction that is off asks for nothing. Several calls in a row must be off to one side. What a look
# finds is believed if two more find the same, and is the new measure. A look that finds nothing new makes the next one
# wait twice as long, and so does one that finds another change soon after the last: a link that goes to and fro, or
# whose rate lies at the border between two plans, is planned for ever more rarely.
LONGER, SHORTER = 1.3, 0.75
CHANGED = 1.25  # a transfer that takes this much longer, or shorter, is worth another plan
_USUAL, _IN_A_ROW = 3, 3
_QUIET, _LONGEST_QUIET = 16, 4096  # calls after a look in which no other is wanted
_STEADY = 256  # as many calls after a look was possible again another change is not soon
_MOST_KINDS = 256


@dataclass
class _Kind:
    """Calls of one kind: the first are for warming up, the next ones are the usual."""

    warm: bool = False
    usual: list[float] = field(default_factory=list)
    off: int = 0  # calls in a row that took longer (positive) or shorter (negative) than usual


class Drift:
    """Watches how long calls take; :attr:`wants_look` once they have been off for a while."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}
        self._quiet, self._next_quiet = 0, _QUIET
        self._unchanged = _LONGEST_QUIET + _STEADY  # calls since the last change
        self.wants_look = False

    def enter(self, kind: Hashable, seconds: float) -> None:
        """A call of this kind took so many seconds."""
        self._quiet -= 1
        self._unchanged += 1
        if len(self._kinds) >= _MOST_KINDS and kind not in self._kinds:
            return
        one = self._kinds.setdefault(kind, _Kind())
        if not one.warm:
            one.warm = True
        elif len(one.usual) < _USUAL:
            one.usual.append(seconds)
        else:
            factor = seconds / median(one.usual)
            side = (factor > LONGER) - (factor < SHORTER)
            one.off = one.off + side if side * one.off >= 0 and side else side
            if abs(one.off) >= _IN_A_ROW and self._quiet <= 0:
                self.wants_look = True

    def looked(self, *, changed: bool) -> None:
        """The wire has been looked at, on this rank's wish or another's; what is usual begins anew."""
        self._kinds.clear()
        if changed and self._unchanged >= self._next_quiet + _STEADY:
            self._next_quiet = _QUIET
        else:
            self._next_quiet = min(2 * self._next_quiet, _LONGEST_QUIET)
        if changed:
            self._unchanged = 0
        self._quiet = self._next_quiet
        self.wants_look = False


def is_changed(factor: float) -> bool:
    """Whether transfers that take ``factor`` times as long as before are worth another plan."""
    return not 1 / CHANGED < factor < CHANGED


def settled(factors: Sequence[float]) -> float:
    """What several looks at one wire come to: the median where all are off to one side, else 1."""
    off = {factor > 1 for factor in factors if is_changed(factor)}
    return median(factors) if len(off) == 1 and all(map(is_changed, factors)) else 1.0


def slowed(machine: Machine, factor: float, uplink_factor: float = 1.0) -> Machine:
    """The machine whose transfers take ``factor`` times as long, and those between nodes ``uplink_factor`` times."""
    return replace(
        machine,
        link=_slowed(machine.link, factor),
        links=tuple(_slowed(link, factor) for link in machine.links),
        uplink=None if machine.uplink is None else _slowed(machine.uplink, uplink_factor),
    )


def _slowed(link: Link, factor: float) -> Link:
    """The link at another rate; what a transfer costs beside its bytes stays."""
    sizes = tuple(
        (size, max(link.latency_s, link.latency_s + (seconds - link.latency_s) * factor))
        for size, seconds in link.sizes
    )
    return replace(link, bytes_per_s=link.bytes_per_s / factor, sizes=sizes)
