"""The process that wires a network and hands it over: one namespace for the switches and one for each rank.

Run as `python -m flashoverlap.lab.wiring RUN_ID TOPOLOGY` with a socket as standard input. It answers with one message
on that socket: the descriptors of the namespaces. Nothing has a name in the file system, so the kernel removes it all
once the last descriptor is closed and the last rank is gone.

          switch namespace                                    rank namespaces
                                             +-- fo1a2b3cp0 ======= fo1a2b3c  10.77.0.1    (rank 0)
           fo1a2b3cd0 ==== fo1a2b3cu0 -- b0 -+-- fo1a2b3cp1 ======= fo1a2b3c  10.77.0.2    (rank 1)
              |                      (bridge)+-- ...        ======= ...
    fo1a2b3cbr (bridge)                          token bucket,      token bucket,
              |                                  toward the rank    from the rank
           fo1a2b3cd1 ==== fo1a2b3cu1 -- b1 -+-- ...
           toward the node  from the node

With one node there is its bridge alone, and no uplink.
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
from flashoverlap.lab.bucket import bucket
from flashoverlap.lab.topology import Port, Topology, node_of

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


def wire(run_id: str, topology: Topology, switch_fd: int, rank_fds: list[int]) -> None:
    """The topology, as netlink calls: bridges, and limited pairs of interfaces between them and to each rank."""
    ours, ends = interface(run_id), list(topology.ports())
    with netlink_in(switch_fd) as netlink, _step("making bridges and pairs of interfaces (veth)"):
        bridges = [_make_bridge(netlink, f"{ours}b{node}") for node in range(topology.nodes)]
        if topology.nodes > 1:
            core = _make_bridge(netlink, f"{ours}br")
            for node, bridge in enumerate(bridges):
                netlink.link("add", ifname=f"{ours}u{node}", kind="veth", peer={"ifname": f"{ours}d{node}"})
                _plug(netlink, f"{ours}u{node}", bridge)
                _plug(netlink, f"{ours}d{node}", core)
        for rank, fd in enumerate(rank_fds):
            netlink.link("add", ifname=f"{ours}p{rank}", kind="veth", peer={"ifname": ours, "net_ns_fd": fd})
            _plug(netlink, f"{ours}p{rank}", bridges[node_of(rank, topology.ranks, topology.nodes)[0]])
        for port in (port for port in ends if port.rank is None):
            _open_port(netlink, ours, port, topology.packet_bytes)
    for rank, fd in enumerate(rank_fds):
        with netlink_in(fd) as netlink, _step(f"setting up the interface of rank {rank}"):
            (loopback,) = netlink.link_lookup(ifname="lo")
            netlink.link("set", index=loopback, state="up")
            (index,) = netlink.link_lookup(ifname=ours)
            netlink.addr("add", index=index, address=address(rank), prefixlen=NETWORK.prefixlen)
            for port in (port for port in ends if port.rank == rank):
                _open_port(netlink, ours, port, topology.packet_bytes)
            _choose_congestion_control()


def limit(netlink: Any, verb: str, name: str, port: Port, rate: int, packet_size: int) -> None:
    """Limits what leaves through a port; ``verb`` is "add" or "change". See the notes of bucket.py."""
    with _step("setting a token bucket (sch_tbf)"):
        (index,) = netlink.link_lookup(ifname=name)
        chosen = bucket(rate, packet_size, behind_another=port.behind_another)
        netlink.tc(verb, "tbf", index, **chosen._asdict())


def _make_bridge(netlink: Any, name: str) -> int:
    netlink.link("add", ifname=name, kind="bridge")
    (index,) = netlink.link_lookup(ifname=name)
    _raise_interface(netlink, index)
    return index


def _plug(netlink: Any, name: str, bridge: int) -> None:
    (index,) = netlink.link_lookup(ifname=name)
    netlink.link("set", index=index, master=bridge)


def _open_port(netlink: Any, prefix: str, port: Port, packet_size: int) -> None:
    """Limits a port to the first rate of its link, and sets it up."""
    (index,) = netlink.link_lookup(ifname=prefix + port.name)
    packet.limit_packets(netlink, index, packet_size)
    limit(netlink, "add", prefix + port.name, port, port.link.bytes_per_s, packet_size)
    _raise_interface(netlink, index)


@contextlib.contextmanager
def netlink_in(fd: int) -> Iterator[Any]:
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


def main(run_id: str, topology: Topology) -> None:
    """Makes and wires the namespaces, then sends them over standard input."""
    user_fd, switch_fd, rank_fds = make_namespaces(topology.ranks)
    wire(run_id, topology, switch_fd, rank_fds)
    kinds = [*(["user"] if user_fd >= 0 else []), "switch", *(["rank"] * topology.ranks)]
    fds = [fd for fd in (user_fd, switch_fd, *rank_fds) if fd >= 0]
    with socket.socket(fileno=os.dup(0)) as answer:
        socket.send_fds(answer, [json.dumps(kinds).encode()], fds)


if __name__ == "__main__":
    try:
        main(sys.argv[1], Topology.from_json(sys.argv[2]))
    except Exception as error:  # Whatever it was, the lab shows it as one line.
        sys.exit(str(error) if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}")
