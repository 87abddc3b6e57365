"""The lab: runs a command once per rank, each rank in a network of its own behind a rate-limited link."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TextIO

from flashoverlap.lab.error import LabError
from flashoverlap.lab.network import Network
from flashoverlap.lab.ranks import RankGroup, RankProcess, Sink
from flashoverlap.lab.topology import Topology, node_of
from flashoverlap.lab.wiring import address, interface

_FIRST_PORT = 29500  # torchrun's; always free in a namespace of our own


@dataclass(frozen=True)
class LabResult:
    """What a run that went well left.

    Attributes:
        exit_codes: one for each rank, all zero.
        tails: the last lines of output of each rank.
    """

    exit_codes: tuple[int, ...]
    tails: tuple[str, ...]


class Lab:
    """Ranks on one machine whose wires take time, as in `with Lab(2, "1gbit") as lab: lab.run([...])`.

    Each rank gets a network namespace of its own, joined by a bridge, and each direction of each rank's link is
    limited for itself. With several nodes each has a bridge of its own, and one link to the others which its ranks
    share. Needs root or user namespaces, and pyroute2. With link None or "none" there are neither namespaces nor
    limits: the ranks run plainly on loopback, on any machine.
    """

    def __init__(self, ranks: int, link: str | None, *, nodes: int = 1, uplink: str | None = None) -> None:
        """Checks the arguments; entering builds the network.

        Args:
            ranks: how many.
            link: rate of each rank's link, as in "1gbit", or "1gbit,200mbit@5s" for one that has 200mbit from 5 s after
                the start of each run; "none" or None for plain loopback.
            nodes: how many; ranks beside each other share one.
            uplink: rate of each node's link to the others, in the same forms.

        Raises:
            ValueError: `ranks` is not in 1..250, a link is not understood, or nodes and uplink do not go together.
        """
        self.topology = Topology.parse(ranks, link, nodes, uplink)
        self.ranks, self.nodes = ranks, nodes
        self.run_id = secrets.token_hex(3)
        self._network: Network | None = None
        self._ports = itertools.count(_FIRST_PORT)
        self._open = False

    def __enter__(self) -> Lab:
        """Builds the network.

        Raises:
            LabError: this machine refuses it; the message says why in one line.
        """
        if self.topology is not None:
            self._network = Network.wire(self.run_id, self.topology)
        self._open = True
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        if self._network is not None:
            self._network.close()
            self._network = None

    @property
    def interface(self) -> str:
        """The name of the interface through which a rank reaches the others."""
        return "lo" if self.topology is None else interface(self.run_id)

    def address(self, rank: int) -> str:
        """The address of a rank."""
        return "127.0.0.1" if self.topology is None else address(rank)

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        prefix: bool = True,
    ) -> LabResult:
        """Runs `command` once per rank, with the variables that torchrun sets, and waits for all.

        Args:
            command: program and arguments, the same for each rank.
            env: variables beside those of this process. OMP_NUM_THREADS and PYTHONUNBUFFERED are 1 unless set.
            timeout_s: after so many seconds all ranks are ended and the run has failed; None waits for ever.
            stdout: where the ranks' standard output goes, line by line; None is `sys.stdout`.
            stderr: the same for standard error; None is `sys.stderr`.
            prefix: whether each line begins with its rank, as in `[rank 1] `.

        Raises:
            ValueError: `command` is empty or not to be found, or `env` sets a variable that the lab sets.
            LabError: a rank failed (the others get 5 s for words of their own and are ended), time ran out, or a link
                could not be changed.
        """
        environments = self.environments(env)
        if not command:
            raise ValueError(f"the command for the ranks is empty: {command!r}")
        if shutil.which(command[0], path=environments[0].get("PATH")) is None:
            raise ValueError(f"the command for the ranks is not to be found: {command[0]!r}")
        if not self._open:
            raise RuntimeError("a lab runs inside a with statement only")
        sink = _line_sink(stdout or sys.stdout, stderr or sys.stderr, prefix)
        with _sigterm_as_exit(), self._changing(), contextlib.closing(RankGroup()) as group:
            try:
                for rank, environment in enumerate(environments):
                    group.add(RankProcess(rank, command, environment, *self._namespaces(rank)))
                group.watch(sink, timeout_s)
            except LabError:
                raise
            except BaseException:  # An interrupt, or an output that cannot be written to.
                group.end()
                raise
            return LabResult(tuple(0 for _ in environments), tuple("\n".join(m.tail) for m in group.members))

    def environments(self, env: Mapping[str, str] | None = None) -> list[dict[str, str]]:
        """The environment of each rank of one run; asks for a fresh port each time."""
        port = _free_port() if self.topology is None else next(self._ports)
        shared = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ, **(env or {})}
        environments = [{**shared, **self._variables(rank, port)} for rank in range(self.ranks)]
        ours = sorted(set(env or {}) & set(self._variables(0, port)))
        if ours:
            raise ValueError(f"the lab sets {', '.join(ours)} itself: leave them out of env")
        return environments

    def _variables(self, rank: int, port: int) -> dict[str, str]:
        """What torchrun would set, and the interface for each of the transports."""
        node, local_rank, local_ranks = node_of(rank, self.ranks, self.nodes)
        world = {name: str(self.ranks) for name in ("WORLD_SIZE", "ROLE_WORLD_SIZE")}
        place = {name: str(rank) for name in ("RANK", "ROLE_RANK")}
        interfaces = {f"{name}_SOCKET_IFNAME": self.interface for name in ("GLOO", "TP", "NCCL")}
        return {
            **world, **place, **interfaces,
            "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_ranks),
            "GROUP_RANK": str(node), "GROUP_WORLD_SIZE": str(self.nodes), "ROLE_NAME": "default",
            "MASTER_ADDR": self.address(0), "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": self.run_id, "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # Rank 0 serves the store: the lab itself has no address inside.
        }  # fmt: skip

    def _namespaces(self, rank: int) -> tuple[int, int]:
        return (-1, -1) if self._network is None else (self._network.user_fd, self._network.rank_fds[rank])

    def _changing(self) -> contextlib.AbstractContextManager[None]:
        if self._network is None or self.topology is None:
            return contextlib.nullcontext()
        return self._network.changing(self.run_id, self.topology)


def lab_unavailable() -> str | None:
    """Returns why this machine allows no lab, in one line, or None; tries it with a small one."""
    try:
        with Lab(1, "1gbit") as lab, open(os.devnull, "w") as nowhere:
            lab.run([sys.executable, "-S", "-c", ""], stdout=nowhere, stderr=nowhere, timeout_s=30.0)
    except (LabError, OSError, subprocess.SubprocessError) as error:
        return str(error).splitlines()[0]
    return None


def run_command(
    ranks: int, link: str | None, command: Sequence[str], *, nodes: int = 1, uplink: str | None = None
) -> int:
    """Runs `command` in a lab and returns an exit status for the shell; failures go to standard error.

    Raises:
        ValueError: what :class:`Lab` refuses, or `command` is empty or not to be found.
    """
    lab = Lab(ranks, link, nodes=nodes, uplink=uplink)
    if not command:
        raise ValueError(f"the command for the ranks is empty: {list(command)!r}")
    try:
        with lab:
            lab.run(command)
    except LabError as error:
        print(f"flashoverlap lab: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _line_sink(stdout: TextIO, stderr: TextIO, prefix: bool) -> Sink:
    """Writes whole lines to their stream, each with its rank in front."""
    streams = {"stdout": stdout, "stderr": stderr}

    def write(rank: int, stream: str, lines: str) -> None:
        mark = f"[rank {rank}] " if prefix else ""
        streams[stream].write("".join(f"{mark}{line}\n" for line in lines[:-1].split("\n")))
        streams[stream].flush()

    return write


def _free_port() -> int:
    """A port of loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Turns a SIGTERM into SystemExit, so that ranks are ended; only where nobody else has a handler for it."""

    def leave(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if mine:
        signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
