"""What a schedule runs on: how long a kernel, a transfer and a collective take, as measured or guessed numbers.

Nothing here knows of a schedule. :func:`flashoverlap.simulate.simulate` replays a schedule on a machine, and
calibration fills a machine in from measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


def _check(what: str, value: float, *, positive: bool = False, infinite: bool = False) -> None:
    """Raises ValueError unless ``value`` is a number >= 0 (> 0 if ``positive``), and finite unless ``infinite``."""
    right = value > 0 if positive else value >= 0
    if not right or (math.isinf(value) and not infinite):
        kind = "a number above 0" if positive else "a finite number of 0 or more"
        raise ValueError(f"{what} must be {kind}, not {value!r}")


@dataclass(frozen=True)
class Kernel:
    """A kernel's cost: ``fixed_s`` seconds a call and ``seconds_per_row`` for each row that it reads.

    Raises:
        ValueError: a cost is negative or not finite.
    """

    fixed_s: float = 0.0
    seconds_per_row: float = 0.0

    def __post_init__(self) -> None:
        _check("fixed_s", self.fixed_s)
        _check("seconds_per_row", self.seconds_per_row)

    def seconds(self, rows: int) -> float:
        """Seconds of one call on ``rows`` rows."""
        return self.fixed_s + rows * self.seconds_per_row


@dataclass(frozen=True)
class Link:
    """What a rank's wire does, in each direction by itself: a transfer takes ``latency_s + bytes / bytes_per_s``.

    Raises:
        ValueError: a negative latency, or a bandwidth that is not above 0 (infinite is allowed).
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _check("latency_s", self.latency_s)
        _check("bytes_per_s", self.bytes_per_s, positive=True, infinite=True)


@dataclass(frozen=True)
class Machine:
    """One rank's kernels and its wire; all ranks are alike. Hashable, so that what is planned for it can be cached.

    Args:
        link: the wire between any two ranks.
        kernels: cost of each kernel by its name in the schedule (``mm``, ``up``, ``down``, ``wgrad``, ...).
        add: cost of adding one buffer onto another, its rows counted; free unless given.
        ports: transfers of a rank that may be in flight at once in each direction, each at the full ``bytes_per_s``.
        contention: a kernel runs ``1 + contention`` times slower while the rank's wire is busy in either direction.
        issue_s: what issuing one operation costs the program, whatever the operation is.
        collective_efficiency: share of ``bytes_per_s`` that the backend's own collectives reach.

    Raises:
        ValueError: a number is out of its range, or ``kernels`` holds something that is no Kernel.
    """

    link: Link
    kernels: Mapping[str, Kernel]
    add: Kernel = field(default_factory=Kernel)
    ports: int = 1
    contention: float = 0.0
    issue_s: float = 0.0
    collective_efficiency: float = 1.0

    def __post_init__(self) -> None:
        for name, kernel in self.kernels.items():
            if not isinstance(kernel, Kernel):
                raise ValueError(f"kernel {name!r} must be a Kernel, not {kernel!r}")
        if not isinstance(self.ports, int) or self.ports < 1:
            raise ValueError(f"ports must be a whole number of 1 or more, not {self.ports!r}")
        _check("contention", self.contention)
        _check("issue_s", self.issue_s)
        _check("collective_efficiency", self.collective_efficiency, positive=True)
        object.__setattr__(self, "kernels", dict(self.kernels))  # the caller's own may change; a hashed one may not

    def __hash__(self) -> int:
        kernels = frozenset(self.kernels.items())
        numbers = (self.ports, self.contention, self.issue_s, self.collective_efficiency)
        return hash((self.link, kernels, self.add, *numbers))

    def kernel(self, name: str) -> Kernel:
        """The kernel called ``name``; raises ValueError, with the names known, where there is none."""
        if name not in self.kernels:
            known = ", ".join(sorted(self.kernels)) or "none"
            raise ValueError(f"this machine has no kernel {name!r}; known: {known}")
        return self.kernels[name]

    def transfer_s(self, nbytes: int) -> float:
        """Seconds that one transfer holds the wire; nothing to move costs nothing."""
        return self.link.latency_s + nbytes / self.link.bytes_per_s if nbytes else 0.0

    def collective_s(self, rounds: int, nbytes: float) -> float:
        """Seconds of a backend's collective that takes ``rounds`` latencies and moves ``nbytes`` through a rank."""
        bytes_per_s = self.link.bytes_per_s * self.collective_efficiency
        return rounds * self.link.latency_s + nbytes / bytes_per_s if nbytes else 0.0
