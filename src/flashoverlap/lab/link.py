"""A link: the rate of the wire between a rank and its switch, or between two switches, and how it changes over time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

_UNITS_BITS_PER_S = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_TIME = re.compile(r"(\d+(?:\.\d+)?)s")
_ACCEPTED = (
    "a number and kbit, mbit or gbit, as in '100kbit', '400mbit', '2.5gbit', or 'none' for plain loopback; "
    "'1gbit,200mbit@5s' is a link that has 200mbit from 5 s after the start"
)

# The kernel's token bucket keeps its rate in 32 bits of bytes per second.
_MIN_BYTES_PER_S = 10**4 // 8
_MAX_BYTES_PER_S = 32 * 10**9 // 8


@dataclass(frozen=True)
class Link:
    """The rate of one direction of a link; both directions have it, each for itself.

    Attributes:
        bytes_per_s: rate at the start in bytes per second, Ethernet headers included.
        changes: later rates, as (seconds after the start of a run, bytes per second), in the order of time.
    """

    bytes_per_s: int
    changes: tuple[tuple[float, int], ...] = ()

    @staticmethod
    def parse(text: str | None) -> Link | None:
        """Reads a rate such as `1gbit`, or one that changes such as `1gbit,200mbit@5s,1gbit@10s`.

        `none` and None mean no limit and no namespaces, which is None.

        Raises:
            ValueError: `text` is not one of the accepted forms or out of range; the message names them.
        """
        if text is None or text.strip().lower() == "none":
            return None
        first, *later = text.strip().lower().split(",")
        link = Link(_rate(first, text), tuple(_change(change, text) for change in later))
        times = [0.0, *(start_s for start_s, _ in link.changes)]
        if any(after <= before for before, after in pairwise(times)):
            raise ValueError(f"link {text!r} changes at {times[1:]} s: each change must come after the one before it")
        return link

    @property
    def rates(self) -> tuple[int, ...]:
        """All rates that the link ever has."""
        return (self.bytes_per_s, *(rate for _, rate in self.changes))


def _change(text: str, whole: str) -> tuple[float, int]:
    """Reads `200mbit@5s`: from when on, and the rate."""
    rate, _, time = text.partition("@")
    match = _TIME.fullmatch(time.strip())
    if match is None:
        raise ValueError(f"link {whole!r} is not understood: give {_ACCEPTED}")
    return float(match[1]), _rate(rate, whole)


def _rate(text: str, whole: str) -> int:
    """Reads `1gbit` in bytes per second."""
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"link {whole!r} is not understood: give {_ACCEPTED}")
    bytes_per_s = round(float(match[1]) * _UNITS_BITS_PER_S[match[2]] / 8)
    if not _MIN_BYTES_PER_S <= bytes_per_s <= _MAX_BYTES_PER_S:
        raise ValueError(f"link {whole!r} is out of range: give 10kbit to 32gbit, or 'none' for plain loopback")
    return bytes_per_s
