"""The token bucket that stands for a wire in one direction, and the size of the packets that go through it.

[Note: burst and packet size]
A token bucket passes a packet once it holds tokens for the whole of it, so the bucket cannot be smaller than the
largest packet, and what it holds passes for free after a pause, which a wire does not allow: a message of n bytes
takes about (n - burst) / rate, so it ends up to PACKET_S early. On the other side every packet costs CPU time, mostly
in interrupts that stop whatever computes there, and the lab is to cost little: packets of a quarter of a millisecond
slowed the matmuls beside a busy 1 Gbit/s link by 15 %, of 64 KiB by 7 %, of 192 KiB by 3 %, most of which is copying.
Beyond 64 KiB they take a kernel that hands down larger ones for IPv4 (6.3 or newer); an older one stays at 64 KiB.
The bucket is larger than a packet by TIMER_S of line time: the tokens of a timer that fires late by no more are kept,
and beyond that rate is lost. A bucket behind another one holds SLACK packets more, so that a stream which the first
has spaced already passes without a timer of its own.

[Note: one packet size] A connection keeps the packets that its interface had when it was made, whatever it meets on its
way and however the link changes. So a lab has one packet size, that of its slowest rate ever.
"""

from __future__ import annotations

from typing import NamedTuple

PACKET_S = 2.5e-3
TIMER_S = 50e-6
SLACK = 2
_FRAME_BYTES = 1514
_HEADER_BYTES = 66
_MAX_PACKET_BYTES = 3 * 65536
_OFFLOAD_RESERVE_BYTES = 512  # TCP keeps some 320 bytes of the offload limit for itself.

# Room before the bucket, in line time: what many senders to one rank may have waiting. With 5 ms eight senders lose
# many packets; with 50 ms a small message waits 40 ms behind large ones.
QUEUE_S = 20e-3


class Bucket(NamedTuple):
    """What the kernel is told of one direction of a wire, in bytes per second and bytes.

    ``burst`` may pass at once after a pause, ``limit`` may wait before packets are dropped.
    """

    rate: int
    burst: int
    limit: int


def packet_bytes(slowest: int) -> int:
    """The largest packet that the kernel may hand to an interface, where the slowest rate ever is ``slowest``."""
    frames = max(round(slowest * PACKET_S) // _FRAME_BYTES, 1)
    return min(frames * (_FRAME_BYTES - _HEADER_BYTES) + _OFFLOAD_RESERVE_BYTES, _MAX_PACKET_BYTES)


def bucket(rate: int, packet: int, *, behind_another: bool = False) -> Bucket:
    """The bucket of a wire of ``rate`` bytes per second for packets of ``packet`` bytes."""
    frames = packet // (_FRAME_BYTES - _HEADER_BYTES) + 1
    burst = packet + frames * _HEADER_BYTES + round(rate * TIMER_S)
    limit = round(rate * QUEUE_S) + 2 * burst + _MAX_PACKET_BYTES
    return Bucket(rate, burst + (SLACK * packet if behind_another else 0), limit)
