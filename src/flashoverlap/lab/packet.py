"""The largest packet that the kernel hands to an interface; pyroute2 lacks the attribute for large IPv4 packets."""

from __future__ import annotations

import socket
import struct
from typing import Any

_LEGACY_BYTES = 65536
_RTM_NEWLINK, _REQUEST = 16, 1
_GSO_IPV4_MAX_SIZE, _GRO_IPV4_MAX_SIZE = 63, 64


def limit_packets(netlink: Any, index: int, packet_bytes: int) -> None:
    """Sets the limit of the interface `index`, which is in the namespace of both `netlink` and this process.

    A kernel that does not know packets beyond 64 KiB for IPv4 (older than 6.3) stays at 64 KiB.
    """
    netlink.link("set", index=index, gso_max_size=min(packet_bytes, _LEGACY_BYTES))
    if packet_bytes <= _LEGACY_BYTES:
        return
    sizes = (struct.pack("=HHI", 8, kind, packet_bytes) for kind in (_GSO_IPV4_MAX_SIZE, _GRO_IPV4_MAX_SIZE))
    body = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, 0, 0) + b"".join(sizes)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as raw:
        raw.send(struct.pack("=IHHII", 16 + len(body), _RTM_NEWLINK, _REQUEST, 0, 0) + body)
