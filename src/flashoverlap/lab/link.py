"""A link: the rate of the wire between a rank and the switch, and the token bucket that stands for it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS_BITS_PER_S = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_FORM = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_ACCEPTED = "a number and kbit, mbit or gbit, as in '100kbit', '400mbit', '2.5gbit', or 'none' for plain loopback"

# The kernel's token bucket keeps its rate in 32 bits of bytes per second.
_MIN_BYTES_PER_S = 10**4 // 8
_MAX_BYTES_PER_S = 32 * 10**9 // 8


# [Note: burst and packet size]
# A token bucket passes a packet once it holds tokens for the whole of it, so the bucket cannot be smaller than the
# largest packet, and what it holds passes for free after a pause, which a wire does not allow: a message of n bytes
# takes about (n - burst) / rate, so it ends up to PACKET_S early. On the other side every packet costs CPU time, mostly
# in interrupts that stop whatever computes there, and the lab is to cost little: packets of a quarter of a millisecond
# slowed the matmuls beside a busy 1 Gbit/s link by 15 %, of 64 KiB by 7 %, of 192 KiB by 3 %, most of which is copying.
# Beyond 64 KiB they take a kernel that hands down larger ones for IPv4 (6.3 or newer); an older one stays at 64 KiB.
# The bucket is larger than a packet by TIMER_S of line time: the tokens of a timer that fires late by no more are kept,
# and beyond that rate is lost. The bucket toward a rank holds SLACK packets more, so that a stream which the sender's
# bucket has spaced already passes without a timer of its own.
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


@dataclass(frozen=True)
class Link:
    """The rate of one direction of a link; both directions have it, each for itself.

    Attributes:
        bytes_per_s: rate in bytes per second, Ethernet headers included.
    """

    bytes_per_s: int

    @staticmethod
    def parse(text: str | None) -> Link | None:
        """Reads a rate such as `1gbit`; `none` and None mean no limit and no namespaces, which is None.

        Raises:
            ValueError: `text` is not one of the accepted forms or out of range; the message names them.
        """
        if text is None or text.strip().lower() == "none":
            return None
        match = _FORM.fullmatch(text.strip().lower())
        if match is None:
            raise ValueError(f"link {text!r} is not understood: give {_ACCEPTED}")
        bytes_per_s = round(float(match[1]) * _UNITS_BITS_PER_S[match[2]] / 8)
        if not _MIN_BYTES_PER_S <= bytes_per_s <= _MAX_BYTES_PER_S:
            raise ValueError(f"link {text!r} is out of range: give 10kbit to 32gbit, or 'none' for plain loopback")
        return Link(bytes_per_s)

    @property
    def packet_bytes(self) -> int:
        """The largest packet that the kernel may hand to the interface before it is cut into frames."""
        frames = max(round(self.bytes_per_s * PACKET_S) // _FRAME_BYTES, 1)
        return min(frames * (_FRAME_BYTES - _HEADER_BYTES) + _OFFLOAD_RESERVE_BYTES, _MAX_PACKET_BYTES)

    @property
    def burst_bytes(self) -> int:
        """What may pass at once after a pause; see [Note: burst and packet size]."""
        frames = self.packet_bytes // (_FRAME_BYTES - _HEADER_BYTES) + 1
        return self.packet_bytes + frames * _HEADER_BYTES + round(self.bytes_per_s * TIMER_S)

    @property
    def slack_burst_bytes(self) -> int:
        """The burst of the bucket toward a rank."""
        return self.burst_bytes + SLACK * self.packet_bytes

    @property
    def queue_bytes(self) -> int:
        """How much may wait before the bucket until packets are dropped."""
        return round(self.bytes_per_s * QUEUE_S) + 2 * self.burst_bytes + _MAX_PACKET_BYTES
