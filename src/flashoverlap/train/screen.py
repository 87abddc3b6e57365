"""What a run shows while it goes: a bar on a terminal, plain lines anywhere else, on rank 0 only."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_WIDTH = 160  # of tables, where there is no terminal to ask


class Screen:
    """Where rank 0 writes; other ranks write nowhere.

    Args:
        rank: of this process.
        terminal: device to write to instead of standard output.
    """

    def __init__(self, rank: int, terminal: str = "") -> None:
        self.rank = rank
        if rank > 0:
            self.console = Console(file=io.StringIO(), quiet=True)
        elif terminal:
            # no controlling terminal: an interrupt is for the process that started the ranks
            descriptor = os.open(terminal, os.O_WRONLY | os.O_NOCTTY)
            file = os.fdopen(descriptor, "w", encoding="utf-8")
            self.console = Console(file=file, width=os.get_terminal_size(descriptor).columns or 80)
        else:
            self.console = Console(width=None if sys.stdout.isatty() else _WIDTH)
        self._bar: tuple[Progress, Any] | None = None
        self._said: set[str] = set()

    @contextmanager
    def steps(self, first: int, steps: int) -> Iterator[None]:
        """Shows a bar meanwhile."""
        if not self.console.is_terminal:
            yield
            return
        columns = (
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        # drawn between steps only: a thread that draws would take its time from the steps
        with Progress(*columns, console=self.console, transient=True, auto_refresh=False) as bar:
            self._bar = (bar, bar.add_task("", total=steps, completed=first))
            yield
        self._bar = None

    def step(self, done: int, steps: int, text: str) -> None:
        """Says what a step gave."""
        if self._bar is None:
            self.say(f"step {done}/{steps}  {text}")
        else:
            bar, task = self._bar
            bar.update(task, completed=done, description=text, refresh=True)

    def say_once(self, texts: Iterable[str]) -> None:
        """Says each of some texts, unless it has been said before."""
        for text in texts:
            if text not in self._said:
                self._said.add(text)
                self.say(text)

    def say(self, text: str) -> None:
        """Says something in a line of its own."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
