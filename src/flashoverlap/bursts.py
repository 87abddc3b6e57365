"""What wires that let bursts through have saved up while they were idle: the token bucket of each rank's wire out."""

from __future__ import annotations

from .machine import Machine


class Bursts:
    """The buckets of the first ``ranks`` ranks; full at first."""

    def __init__(self, machine: Machine, ranks: int) -> None:
        self._links = [machine.link_of(rank) for rank in range(ranks)]
        self._saved_bytes = [link.burst_bytes for link in self._links]
        self._as_of_s = [0.0] * ranks

    def gained_s(self, rank: int, nbytes: int, seconds: float, now: float) -> float:
        """What a transfer of ``nbytes`` that would take ``seconds`` gains by the pause before it, which it uses up."""
        link, paused_s = self._links[rank], max(0.0, now - self._as_of_s[rank])
        saved = min(link.burst_bytes, self._saved_bytes[rank] + paused_s * link.bytes_per_s)
        passed = min(saved, nbytes)
        gained_s = min(passed / link.bytes_per_s, seconds)
        self._saved_bytes[rank], self._as_of_s[rank] = saved - passed, now + seconds - gained_s
        return gained_s
