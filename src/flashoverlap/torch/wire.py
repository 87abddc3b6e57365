"""What a group's wire does: transfers timed as the schedules make them, in both directions at once.

[Note: bursts] What lies between two ranks may pass some bytes at once after a pause (a token bucket, a queue), so a
short transfer after a pause says nothing of the rate. So rates are told from what arrives after a first transfer, which
is larger than any burst; and the burst is what a transfer after a pause lacks beside that rate.

[Note: who measures what] Each step is taken by all ranks together after the exchange of a few numbers, by which they
also agree how long it is to be. Nobody decides alone.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from .transport import CARD_BYTES

STEP_S = 0.04  # a run that a rate is told from takes as long, or a little longer
MOST_BYTES = 16 << 20
_SIZES = (1 << 10, 16 << 10, 128 << 10, 1 << 20)
_EMPTY_EXCHANGES = 50
_PAUSE_S = 0.01
_BURSTS, _HELD_UP, _RUNS = 7, 2, 5  # of so many transfers after a pause some may be held up by other work


def gathered(transport: Any, values: Sequence[float]) -> list[tuple[float, ...]]:
    """Every rank's numbers, by rank; all ranks give as many, at most 128."""
    if transport.world_size == 1:
        return [tuple(values)]
    form = struct.Struct(f"<{len(values)}d")
    cards = transport.exchange_cards(form.pack(*values).ljust(CARD_BYTES, b"\0"))
    return [form.unpack_from(card) for card in cards]


def slowest(transport: Any, seconds: float) -> float:
    """The longest of all ranks' times."""
    return max(theirs for (theirs,) in gathered(transport, [seconds]))


class Partners(NamedTuple):
    """Whom this rank sends to and receives from in one round; itself where it takes no part."""

    to: int
    frm: int


def inside(rank: int, nodes: Sequence[int], shift: int) -> Partners:
    """A rotation by ``shift`` of the ranks of each node among themselves."""
    first = 0
    for count in nodes:
        if rank < first + count:
            place = rank - first
            return Partners(first + (place + shift) % count, first + (place - shift) % count)
        first += count
    raise ValueError(f"rank {rank} is on none of nodes {tuple(nodes)}")


def between(rank: int, nodes: Sequence[int]) -> Partners:
    """The first rank of each node with that of the next; all others take no part."""
    firsts = [sum(nodes[:node]) for node in range(len(nodes))]
    if rank not in firsts:
        return Partners(rank, rank)
    node = firsts.index(rank)
    return Partners(firsts[(node + 1) % len(nodes)], firsts[node - 1])


class Wire:
    """The wire of a group, to be timed.

    Args:
        transport: of the group.
        device: where the tensors are that travel.
        most: bytes of the largest transfer.
    """

    def __init__(self, transport: Any, device: torch.device, most: int = MOST_BYTES) -> None:
        self._transport, self._device, self._most = transport, device, most
        self._out, self._in = (torch.zeros(most, dtype=torch.uint8, device=device) for _ in range(2))

    def start(self, partners: Partners, sizes: Sequence[int]) -> list[Any]:
        """Posts transfers of ``sizes`` bytes, one after another each way; their tickets, those of arrivals first."""
        if partners.to == self._transport.rank:
            return []
        receives = [self._in[:size] for size in sizes]
        expected = [self._transport.expect(receive, partners.frm) for receive in receives]
        posted = [
            self._transport.post(self._out[:size], partners.to, receive, partners.frm, expected=early)
            for size, receive, early in zip(sizes, receives, expected, strict=True)
        ]
        return [arriving for _, arriving in posted] + [leaving for leaving, _ in posted]

    def arrivals(self, partners: Partners, sizes: Sequence[int]) -> list[float]:
        """Seconds until each of such transfers had arrived at this rank; all ranks begin together."""
        gathered(self._transport, [])
        start_s, times = time.perf_counter(), []
        for ticket in self.start(partners, sizes):
            ticket.wait()
            synchronize(self._device)
            times.append(time.perf_counter() - start_s)
        return times[: len(sizes)] or [0.0] * len(sizes)

    def empty_s(self, partners: Partners) -> float:
        """Seconds of an exchange of one byte, alone on the wire: what every transfer costs that nothing holds up."""
        gathered(self._transport, [])
        times = []
        for _ in range(_EMPTY_EXCHANGES):
            start_s = time.perf_counter()
            for ticket in self.start(partners, [1]):
                ticket.wait()
            synchronize(self._device)
            times.append(time.perf_counter() - start_s)
        return sorted(times)[len(times) // 4]  # others' bursts of work make the upper half long

    def step_bytes(self, partners: Partners) -> int:
        """A transfer that takes some STEP_S; the same on every rank. One that was held up once is tried again."""
        size = 1 << 12
        while size < self._most:
            seconds = min(slowest(self._transport, self.arrivals(partners, [size])[0]) for _ in range(2))
            if seconds >= STEP_S / 2:
                break
            size = min(self._most, size * (4 if seconds < STEP_S / 8 else 2))
        return size

    def rate(self, partners: Partners, step: int) -> float:
        """Bytes per second at which this rank receives, while it sends as much: the median of a few runs."""
        half = step // 2
        runs = [self.arrivals(partners, [half, half, half]) for _ in range(_RUNS)]
        return median(2 * half / (last_s - first_s) if last_s > first_s else 0.0 for first_s, _, last_s in runs)

    def burst_bytes(self, partners: Partners, size: int, empty_s: float, bytes_per_s: float) -> float:
        """Bytes that the wire passes at once after a pause, as this rank sees them; 0 where that is no clear number."""
        found = []
        for _ in range(_BURSTS):
            time.sleep(_PAUSE_S)
            (seconds,) = self.arrivals(partners, [size])
            found.append(size - (seconds - empty_s) * bytes_per_s)
        found.sort()
        return min(size / 2, median(found)) if found[_HELD_UP] > 0 else 0.0

    def sizes(self, partners: Partners, step: int, bytes_per_s: float) -> tuple[list[int], list[float]]:
        """Some sizes, and the seconds of one transfer of each among many, after a larger one."""
        sizes = [size for size in _SIZES if size <= step // 4]
        seconds = []
        for size in sizes:
            count = max(2, min(16, round(STEP_S * bytes_per_s / size)))
            times = self.arrivals(partners, [step // 4, *[size] * count])
            seconds.append((times[-1] - times[0]) / count)
        return sizes, seconds


def synchronize(device: torch.device) -> None:
    """Waits for all work of an accelerator."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
