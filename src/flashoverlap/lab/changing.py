"""The process that changes links during a run, for as long as the run lasts.

Run as `python -m flashoverlap.lab.changing PARENT RUN_ID TOPOLOGY USER_FD SWITCH_FD RANK_FD...`. It sets the rates of
the start, says so by a line on standard output, and goes on from there by the clock. It dies with its parent.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import NamedTuple

from flashoverlap.lab import namespace
from flashoverlap.lab.topology import Port, Topology
from flashoverlap.lab.wiring import interface, limit, netlink_in


class Change(NamedTuple):
    """From ``start_s`` after the start, a port has the rate ``bytes_per_s``."""

    start_s: float
    bytes_per_s: int
    port: Port


def timeline(topology: Topology) -> list[Change]:
    """All changes in the order of time, with the rates of the start at 0 s; links that stay as they are have none."""
    ports = [port for port in topology.ports() if port.link.changes]
    changes = (Change(*when, port) for port in ports for when in ((0.0, port.link.bytes_per_s), *port.link.changes))
    return sorted(changes, key=lambda change: change.start_s)


def main(parent: int, run_id: str, topology: Topology, user_fd: int, fds: list[int]) -> None:
    """Makes every change when it is due; ``fds`` are the namespaces of the switches and of each rank."""
    if user_fd >= 0:
        namespace.setns(user_fd, namespace.CLONE_NEWUSER)
    with ExitStack() as stack:
        netlinks = [stack.enter_context(netlink_in(fd)) for fd in fds]
        namespace.die_with(parent)
        started_s = None
        for change in timeline(topology):
            if change.start_s and started_s is None:
                print("started", flush=True)
                started_s = time.monotonic()
            if started_s is not None:
                time.sleep(max(0.0, started_s + change.start_s - time.monotonic()))
            port = change.port
            netlink = netlinks[0 if port.rank is None else port.rank + 1]
            limit(netlink, "change", interface(run_id) + port.name, port, change.bytes_per_s, topology.packet_bytes)


if __name__ == "__main__":
    try:
        user, *others = map(int, sys.argv[4:])
        main(int(sys.argv[1]), sys.argv[2], Topology.from_json(sys.argv[3]), user, others)
    except Exception as error:  # Whatever it was, the lab shows it as one line.
        sys.exit(f"{type(error).__name__}: {error}")
