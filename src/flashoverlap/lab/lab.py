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
from flashoverlap.lab.link import Link
from flashoverlap.lab.network import MAX_RANKS, Network
from flashoverlap.lab.ranks import RankGroup, RankProcess, Sink
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
    limited for itself. Needs root or user namespaces, and pyroute2. With link None or "none" there are neither
    namespaces nor limits: the ranks run plainly on loopback, on any machine.
    """

    def __init__(self, ranks: int, link: str | None) -> None:
        """Checks the arguments; entering builds the network.

        Raises:
            ValueError: `ranks` is not in 1..250, or `link` is not a rate such as "1gbit", nor "none".
        """
        self.link = Link.parse(link)
        if not 1 <= ranks <= MAX_RANKS:
            raise ValueError(f"a lab has 1 to {MAX_RANKS} ranks, not {ranks}")
        self.ranks = ranks
        self.run_id = secrets.token_hex(3)
        self._network: Network | None = None
        self._ports = itertools.count(_FIRST_PORT)
        self._open = False

    def __enter__(self) -> Lab:
        """Builds the network.

        Raises:
            LabError: this machine refuses it; the message says why in one line.
        """
        if self.link is not None:
            self._network = Network.wire(self.run_id, self.ranks, self.link)
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
        return "lo" if self.link is None else interface(self.run_id)

    def address(self, rank: int) -> str:
        """The address of a rank."""
        return "127.0.0.1" if self.link is None else address(rank)

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
            LabError: a rank failed (the others get 5 s for words of their own and are ended), or time ran out.
        """
        environments = self.environments(env)
        if not command:
            raise ValueError(f"the command for the ranks is empty: {command!r}")
        if shutil.which(command[0], path=environments[0].get("PATH")) is None:
            raise ValueError(f"the command for the ranks is not to be found: {command[0]!r}")
        if not self._open:
            raise RuntimeError("a lab runs inside a with statement only")
        sink = _line_sink(stdout or sys.stdout, stderr or sys.stderr, prefix)
        with _sigterm_as_exit(), contextlib.closing(RankGroup()) as group:
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
        port = _free_port() if self.link is None else next(self._ports)
        shared = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ, **(env or {})}
        environments = [{**shared, **self._variables(rank, port)} for rank in range(self.ranks)]
        ours = sorted(set(env or {}) & set(self._variables(0, port)))
        if ours:
            raise ValueError(f"the lab sets {', '.join(ours)} itself: leave them out of env")
        return environments

    def _variables(self, rank: int, port: int) -> dict[str, str]:
        """What torchrun would set on one node, and the interface for each of the transports."""
        world = {name: str(self.ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")}
        place = {name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")}
        interfaces = {f"{name}_SOCKET_IFNAME": self.interface for name in ("GLOO", "TP", "NCCL")}
        return {
            **world, **place, **interfaces,
            "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default",
            "MASTER_ADDR": self.address(0), "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": self.run_id, "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # Rank 0 serves the store: the lab itself has no address inside.
        }  # fmt: skip

    def _namespaces(self, rank: int) -> tuple[int, int]:
        return (-1, -1) if self._network is None else (self._network.user_fd, self._network.rank_fds[rank])


def lab_unavailable() -> str | None:
    """Returns why this machine allows no lab, in one line, or None; tries it with a small one."""
    try:
        with Lab(1, "1gbit") as lab, open(os.devnull, "w") as nowhere:
            lab.run([sys.executable, "-S", "-c", ""], stdout=nowhere, stderr=nowhere, timeout_s=30.0)
    except (LabError, OSError, subprocess.SubprocessError) as error:
        return str(error).splitlines()[0]
    return None


def run_command(ranks: int, link: str | None, command: Sequence[str]) -> int:
    """Runs `command` in a lab and returns an exit status for the shell; failures go to standard error.

    Raises:
        ValueError: `ranks` is out of range, `command` empty or not to be found, or `link` not understood.
    """
    lab = Lab(ranks, link)
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
