"""The processes of a run, one a rank: started together, read line by line, and ended together."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from flashoverlap.lab.error import LabError

# A rank whose peer died gets FAILURE_GRACE_S to print its own error, and END_GRACE_S to follow a SIGTERM.
FAILURE_GRACE_S = 5.0
END_GRACE_S = 2.0
TAIL_LINES = 20
_TICK_S = 0.05
_DRAIN_S = 1.0
_ENTRY = Path(__file__).with_name("namespace.py")

Sink = Callable[[int, str, str], None]  # rank, "stdout" or "stderr", whole lines


class RankProcess:
    """One rank: a process that leads a session of its own, so that whatever it starts can be ended with it."""

    def __init__(self, rank: int, command: Sequence[str], env: dict[str, str], user_fd: int, net_fd: int) -> None:
        """Starts `command` inside the namespaces of the descriptors (-1: where this process is)."""
        self.rank = rank
        self.ended_s: float | None = None
        self.signalled = False
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._partial = {"stdout": b"", "stderr": b""}
        entry = [sys.executable, "-I", "-S", str(_ENTRY), str(os.getpid()), str(user_fd), str(net_fd)]
        self._process = subprocess.Popen(
            [*entry, *command], env=env, pass_fds={user_fd, net_fd} - {-1}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.pipes = {"stdout": self._process.stdout, "stderr": self._process.stderr}

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while the rank runs."""
        return self._process.returncode

    @property
    def failed(self) -> bool:
        """Whether the rank ended badly on its own account."""
        return bool(self.exit_code) and not self.signalled

    def read(self, stream: str) -> tuple[str, bool]:
        """Returns the whole lines that a stream has ready, and whether it is open still."""
        pipe = self.pipes[stream]
        assert pipe is not None
        chunk = os.read(pipe.fileno(), 1 << 16)
        whole, newline, self._partial[stream] = (self._partial[stream] + chunk).rpartition(b"\n")
        text = whole + newline
        if not chunk and self._partial[stream]:
            text, self._partial[stream] = self._partial[stream] + b"\n", b""
        lines = text.decode(errors="replace")
        self.tail.extend(lines.splitlines())
        return lines, bool(chunk)

    def reap(self) -> bool:
        """Returns whether the rank has ended; if so, ends what it left in its session and keeps its exit code.

        The group is killed before the leader is reaped, while nobody else can have got its number.
        """
        if self.exit_code is None and os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            self.send(signal.SIGKILL)
            self._process.wait()
        return self.exit_code is not None

    def send(self, number: signal.Signals) -> None:
        """Signals the rank and all in its group, unless it has been reaped."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Ends the rank by force if it runs still, and closes its pipes."""
        self.send(signal.SIGKILL)
        self._process.wait()
        for pipe in self.pipes.values():
            assert pipe is not None
            pipe.close()


class RankGroup:
    """All ranks of a run. `watch` runs them to their end; `close` leaves none behind, whatever happened."""

    def __init__(self) -> None:
        self.members: list[RankProcess] = []
        self._selector = selectors.DefaultSelector()
        self._signals: list[tuple[float, signal.Signals]] = []  # due times, while the run is being ended

    def add(self, member: RankProcess) -> None:
        """Takes a started rank in."""
        self.members.append(member)
        for stream, pipe in member.pipes.items():
            assert pipe is not None
            self._selector.register(pipe, selectors.EVENT_READ, (member, stream))

    def watch(self, sink: Sink, timeout_s: float | None) -> None:
        """Passes lines to `sink` until all ranks have ended; ends the others some time after one fails.

        Raises:
            LabError: a rank failed, or the ranks ran for more than `timeout_s` seconds.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        late: list[int] = []
        while alive := [member for member in self.members if not member.reap()]:
            now_s = time.monotonic()
            if deadline_s is not None and now_s >= deadline_s and not late:
                late = [member.rank for member in alive]
                self._plan_end(now_s)
            elif not self._signals and any(member.failed for member in self.members):
                self._plan_end(now_s + FAILURE_GRACE_S)
            self._signal_due(alive, now_s)
            self._pump(sink, _TICK_S)
        self._drain(sink)
        self._raise_failure(late, timeout_s)

    def end(self) -> None:
        """Ends all ranks politely, then by force, without another word from them."""
        self._signals = []
        self._plan_end(time.monotonic())
        while alive := [member for member in self.members if not member.reap()]:
            self._signal_due(alive, time.monotonic())
            self._pump(lambda *_: None, _TICK_S)

    def close(self) -> None:
        """Ends whatever runs still and lets go of all pipes."""
        for member in self.members:
            member.close()
        self._selector.close()

    def _plan_end(self, start_s: float) -> None:
        self._signals = [(start_s, signal.SIGTERM), (start_s + END_GRACE_S, signal.SIGKILL)]

    def _signal_due(self, alive: Iterable[RankProcess], now_s: float) -> None:
        for number in [number for due_s, number in self._signals if due_s <= now_s]:
            for member in alive:
                member.signalled = True
                member.send(number)
        # One due time stays, so that the plan is not made anew.
        self._signals = [entry for entry in self._signals if entry[0] > now_s] or self._signals[-1:]

    def _pump(self, sink: Sink, timeout_s: float) -> bool:
        """Passes on what is ready; returns whether anything came."""
        if not self._selector.get_map():
            time.sleep(min(timeout_s, _TICK_S / 10))  # All pipes are closed, so the ends are near.
            return False
        events = self._selector.select(timeout_s)
        for key, _ in events:
            member, stream = key.data
            lines, is_open = member.read(stream)
            if lines:
                sink(member.rank, stream, lines)
            if not is_open:
                self._selector.unregister(key.fileobj)
                member.ended_s = time.monotonic()
        return bool(events)

    def _drain(self, sink: Sink) -> None:
        """Reads what the ranks wrote last; a pipe that a stray process keeps open is not waited for."""
        deadline_s = time.monotonic() + _DRAIN_S
        while self._pump(sink, 0.0) and time.monotonic() < deadline_s:
            pass

    def _raise_failure(self, late: list[int], timeout_s: float | None) -> None:
        failed = sorted((m for m in self.members if m.failed), key=lambda m: (m.ended_s or float("inf"), m.rank))
        if not failed and late:
            raise LabError(f"ranks {late} of {len(self.members)} still ran after {timeout_s} s and were ended")
        if failed:
            first, others = failed[0], sorted(member.rank for member in failed[1:])
            ended = [member.rank for member in self.members if member.signalled]
            message = f"rank {first.rank} of {len(self.members)} {_describe(first.exit_code)}"
            message += f"; ranks {others} failed too" if others else ""
            message += f"; ranks {ended} were ended" if ended else ""
            tail = "\n".join(first.tail)
            if tail:
                message += f"\nlast output of rank {first.rank}:\n{tail}"
            raise LabError(message, rank=first.rank, exit_code=first.exit_code, tail=tail)


def _describe(exit_code: int | None) -> str:
    """An exit code in words."""
    if exit_code is not None and exit_code < 0:
        with contextlib.suppress(ValueError):
            return f"died of {signal.Signals(-exit_code).name}"
    return f"failed with exit code {exit_code}"
