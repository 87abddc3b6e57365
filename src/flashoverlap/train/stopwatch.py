"""How long all ranks took for something, and how long they stood waiting in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

import flashoverlap.torch as fo

from ..report import Report

T = TypeVar("T")


@dataclass(frozen=True)
class Timed(Generic[T]):
    """What was measured.

    Args:
        value: what the call returned on this rank.
        seconds: of the slowest rank.
        blocked_seconds: that a rank's program stood waiting for a piece, by its own count; the longest.
        report: of this rank's calls meanwhile.
    """

    value: T
    seconds: float
    blocked_seconds: float
    report: Report


class Stopwatch:
    """Times calls that all ranks make together.

    Args:
        group: that all ranks are in, by which the overlapped operators move nothing.
        device: whose work counts.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device

    def time(self, run: Callable[[], T]) -> Timed[T]:
        """Begins on all ranks at once, and ends when this device has finished."""
        fo.report().clear()
        dist.barrier(group=self.group)
        begin_s = time.perf_counter()
        value = run()
        self.synchronize()
        seconds = time.perf_counter() - begin_s
        report = Report.of(fo.report(), fo.report().notes)  # what the ranks do next is no part of it
        numbers = torch.tensor([seconds, sum(record.blocked_s for record in report)], dtype=torch.float64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        slowest_s, blocked_s = numbers.tolist()
        return Timed(value, slowest_s, blocked_s, report)

    def synchronize(self) -> None:
        """Waits for an accelerator; a CPU has always finished."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
