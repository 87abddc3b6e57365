"""The process that wires a network and hands it over: one namespace for the switch and one for each rank.

Run as `python -m flashoverlap.lab.wiring RUN_ID RANKS BYTES_PER_S` with a socket as standard input. It answers with one
message on that socket: the descriptors of the namespaces. Nothing has a name in the file system, so the kernel removes
it all once the last descriptor is closed and the last rank is gone.

          switch namespace                 rank namespaces
                        +-- fo1a2b3cp0 ======= fo1a2b3c  10.77.0.1    (rank 0)
           fo1a2b3cbr --+-- fo1a2b3cp1 ======= fo1a2b3c  10.77.0.2    (rank 1)
             bridge     +-- ...        ======= ...
                            token bucket,      token bucket,
                            toward the rank    from the rank
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashoverlap.lab import namespace, packet
from flashoverlap.lab.link import Link

NETWORK = ipaddress.IPv4Network("10.77.0.0/16")


class RefusedError(RuntimeError):
    """The kernel refused a step of the wiring."""


def address(rank: int) -> str:
    """The address of a rank inside the lab: 10.77.0.1 for rank 0."""
    return str(NETWORK[rank + 1])


def interface(run_id: str) -> str:
    """The name that each rank's interface has in its own namespace."""
    return f"fo{run_id}"


def make_namespaces(ranks: int) -> tuple[int, int, list[int]]:
    """Returns descriptors: user namespace (-1 where none was needed), switch, and one network a rank.

    Plain networks first (root); a user namespace of our own where that is refused.
    """
    user_fd = -1
    with _step("making namespaces (see /proc/sys/user/max_net_namespaces and max_user_namespaces)"):
        try:
            switch_fd = namespace.new_network()
        except PermissionError:
            user_fd = namespace.become_user_root()
            switch_fd = namespace.new_network()
    return user_fd, switch_fd, [namespace.new_network() for _ in range(ranks)]


def wire(run_id: str, link: Link, switch_fd: int, rank_fds: list[int]) -> None:
    """The topology, as netlink calls: a bridge, and a limited pair of interfaces from it to each rank."""
    outside = [f"{interface(run_id)}p{rank}" for rank in range(len(rank_fds))]
    with _netlink(switch_fd) as netlink, _step("making a bridge and pairs of interfaces (veth)"):
        netlink.link("add", ifname=f"{interface(run_id)}br", kind="bridge")
        (bridge,) = netlink.link_lookup(ifname=f"{interface(run_id)}br")
        _raise_interface(netlink, bridge)
        for name, fd in zip(outside, rank_fds, strict=True):
            netlink.link("add", ifname=name, kind="veth", peer={"ifname": interface(run_id), "net_ns_fd": fd})
            (index,) = netlink.link_lookup(ifname=name)
            netlink.link("set", index=index, master=bridge)
            _limit(netlink, index, link, link.slack_burst_bytes)
            _raise_interface(netlink, index)
    for rank, fd in enumerate(rank_fds):
        with _netlink(fd) as netlink, _step(f"setting up the interface of rank {rank}"):
            (loopback,) = netlink.link_lookup(ifname="lo")
            netlink.link("set", index=loopback, state="up")
            (index,) = netlink.link_lookup(ifname=interface(run_id))
            netlink.addr("add", index=index, address=address(rank), prefixlen=NETWORK.prefixlen)
            _limit(netlink, index, link, link.burst_bytes)
            _raise_interface(netlink, index)
            _choose_congestion_control()


@contextlib.contextmanager
def _netlink(fd: int) -> Iterator[Any]:
    """A netlink socket inside the network namespace `fd`: a socket stays in the namespace where it was opened."""
    from pyroute2 import IPRoute  # Late: only the wiring process needs it.

    namespace.setns(fd, namespace.CLONE_NEWNET)
    with IPRoute() as netlink:
        yield netlink


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    """Names the step that the kernel refused, unless a step within has been named."""
    try:
        yield
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(f"{what}: {error}") from error


def _limit(netlink: Any, index: int, link: Link, burst_bytes: int) -> None:
    """Limits what leaves through an interface to the rate of `link`; see [Note: burst and packet size]."""
    packet.limit_packets(netlink, index, link.packet_bytes)
    with _step("adding a token bucket (sch_tbf)"):
        netlink.tc("add", "tbf", index, rate=link.bytes_per_s, burst=burst_bytes, limit=link.queue_bytes)


def _choose_congestion_control() -> None:
    """Takes cubic in this namespace where that may be chosen, so that runs on machines with other defaults compare.

    It sends as the window allows, where others (bbr) pace each flow by timers, which cost CPU time here.
    """
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("cubic")


def _raise_interface(netlink: Any, index: int) -> None:
    """Sets an interface up, without the IPv6 address and chatter that the kernel would add."""
    no_address = {"attrs": [["AF_INET6", {"attrs": [["IFLA_INET6_ADDR_GEN_MODE", 1]]}]]}
    netlink.link("set", index=index, IFLA_AF_SPEC=no_address)
    netlink.link("set", index=index, state="up")


def main(run_id: str, ranks: int, bytes_per_s: int) -> None:
    """Makes and wires the namespaces, then sends them over standard input."""
    user_fd, switch_fd, rank_fds = make_namespaces(ranks)
    wire(run_id, Link(bytes_per_s), switch_fd, rank_fds)
    kinds = [*(["user"] if user_fd >= 0 else []), "switch", *(["rank"] * ranks)]
    fds = [fd for fd in (user_fd, switch_fd, *rank_fds) if fd >= 0]
    with socket.socket(fileno=os.dup(0)) as answer:
        socket.send_fds(answer, [json.dumps(kinds).encode()], fds)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    except Exception as error:  # Whatever it was, the lab shows it as one line.
        sys.exit(str(error) if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}")
