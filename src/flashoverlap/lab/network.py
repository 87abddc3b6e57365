"""A network as the lab holds it: the descriptors of its namespaces, received from the process that wired it."""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashoverlap.lab.error import LabError
from flashoverlap.lab.topology import Topology

_WIRING_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Network:
    """Namespaces that live as long as their descriptors are open here, or a process is inside.

    Attributes:
        user_fd: the user namespace that owns the networks; -1 where none was needed (root).
        switch_fd: the network namespace of the bridges.
        rank_fds: the network namespace of each rank.
    """

    user_fd: int
    switch_fd: int
    rank_fds: tuple[int, ...]

    @staticmethod
    def wire(run_id: str, topology: Topology) -> Network:
        """Has a process of its own build the network, so that this process never leaves its own namespaces.

        Raises:
            LabError: the machine refuses it, with the reason in one line.
        """
        ranks = topology.ranks
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "flashoverlap.lab.wiring", run_id, topology.to_json()]
        with here, subprocess.Popen(
            command, stdin=there.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=_environment(), cwd="/", start_new_session=True,
        ) as process:  # fmt: skip
            try:
                there.close()
                here.settimeout(_WIRING_TIMEOUT_S)
                kinds, fds = _receive(here, ranks + 2)
                _, complaint = process.communicate(timeout=_WIRING_TIMEOUT_S)
            except (TimeoutError, subprocess.TimeoutExpired):
                raise LabError(f"no network lab here: wiring took more than {_WIRING_TIMEOUT_S:.0f} s") from None
            finally:
                process.kill()
        if not kinds:
            lines = complaint.strip().splitlines() or [f"wiring ended with exit code {process.returncode}"]
            raise LabError(f"no network lab here: {lines[-1]}; use link 'none' for plain loopback")
        named = dict(zip(kinds, fds, strict=True))
        return Network(named.get("user", -1), named["switch"], tuple(fds[-ranks:]))

    @contextlib.contextmanager
    def changing(self, run_id: str, topology: Topology) -> Iterator[None]:
        """Within, links change as the topology says, by the clock of a process that starts here and ends here.

        Raises:
            LabError: a change was refused; at the start, or at the end of the run.
        """
        if not any(link.changes for link in topology.links):
            yield
            return
        fds = (self.user_fd, self.switch_fd, *self.rank_fds)
        arguments = map(str, (os.getpid(), run_id, topology.to_json(), *fds))
        with subprocess.Popen(
            [sys.executable, "-m", "flashoverlap.lab.changing", *arguments], pass_fds={*fds} - {-1}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=_environment(), cwd="/", start_new_session=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                started = process.stdout.readline()
                if started:
                    yield
                if process.poll() or not started:
                    raise LabError(f"the links could not be changed: {process.stderr.read().strip()}")
            finally:
                process.kill()

    def close(self) -> None:
        """Lets go of the namespaces; the kernel removes them once no process is inside."""
        for fd in {self.user_fd, self.switch_fd, *self.rank_fds} - {-1}:
            os.close(fd)


def _receive(here: socket.socket, most: int) -> tuple[list[str], list[int]]:
    """Reads what each descriptor is, and the descriptors; both empty where the other side ended without a word."""
    fds = array.array("i")
    room = socket.CMSG_SPACE(most * fds.itemsize)
    message, ancillary, _, _ = here.recvmsg(65536, room, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return (json.loads(message) if message else []), list(fds)


def _environment() -> dict[str, str]:
    """This process's environment, with its import path made absolute for a child in another directory."""
    path = [str(Path(entry or ".").absolute()) for entry in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
