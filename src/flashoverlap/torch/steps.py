"""What the steps of a schedule cost beside computing and moving: tiny schedules, run as all others are."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from ..patterns import build
from ..schedule import Compute, Schedule
from .execute import execute
from .transport import Silent
from .wire import gathered, synchronize

_MANY = 8  # exchanges with each peer
_ROUNDS, _LONG_ROUNDS = 15, 11
_MOST_OFTEN = 8


class Steps(NamedTuple):
    """Seconds on this rank, by the names that :class:`~flashoverlap.machine.Machine` has for them."""

    issue_s: float
    post_s: float = 0.0
    notice_s: float = 0.0


def steps_of(transport: Any, device: torch.device, latency_s: float, multiply: Callable[[], object]) -> Steps:
    """What issuing, posting and waiting cost. Collective.

    A gather of a few bytes and a kernel that does nothing, with one exchange with each peer and with many: what the
    first takes beyond an exchange more, or beyond the wire, is what it takes to be told. The clock on the wall counts,
    since it goes from thread to thread.

    [Note: beside matmuls] Those who carry exchanges out (threads, interrupts) may need a core that a matmul is using.
    So the many are run once more with matmuls that each take longer than an exchange; what those are longer for it is
    what posting costs.

    Args:
        transport: of the group.
        device: of the tensors.
        latency_s: what a message holds the wire for.
        multiply: a short matmul.
    """
    issue_s = _seconds(_schedule(1, _MANY), Silent(), device) / _MANY
    ranks = transport.world_size
    if ranks == 1:
        return Steps(issue_s)
    few, many = (_schedule(ranks, each) for each in (1, _MANY))
    few_s, many_s = (_seconds(each, transport, device) for each in (few, many))
    peers = ranks - 1
    more_s = max(0.0, (many_s - few_s) / (_MANY - 1) - issue_s)  # by one exchange more with each
    told_s = few_s - issue_s - max(more_s, peers * latency_s)
    hidden = _at_least(multiply, max(more_s, peers * latency_s), device)
    posted_s = _longer_s(many, transport, device, hidden) / _MANY
    return Steps(issue_s, max(0.0, posted_s / peers - issue_s), max(0.0, told_s))


def _at_least(multiply: Callable[[], object], seconds: float, device: torch.device) -> Callable[[], object]:
    """The matmul as often as it takes to last so long."""
    start_s = time.perf_counter()
    for _ in range(_MANY):
        multiply()
    synchronize(device)
    often = min(_MOST_OFTEN, math.ceil(seconds * _MANY / (time.perf_counter() - start_s)))
    return multiply if often <= 1 else lambda: [multiply() for _ in range(often)]


def _longer_s(schedule: Schedule, transport: Any, device: torch.device, multiply: Callable[[], object]) -> float:
    """How much longer matmuls take with the exchanges of a schedule beside them than alone, in turns."""
    alone = Silent(transport.rank, transport.world_size)
    longer = []
    for _ in range(_LONG_ROUNDS):
        alone_s, beside_s = (_seconds(schedule, each, device, multiply, 1) for each in (alone, transport))
        longer.append(beside_s - alone_s)
    return max(0.0, fmean(longer))  # an exchange costs little most times, and much where its thread finds no core


def _schedule(ranks: int, exchanges: int) -> Schedule:
    return build("all_gather_matmul", [_MANY] * ranks, pattern="sliced", splits=exchanges, row_bytes={"x": 1})


def _seconds(
    schedule: Schedule,
    transport: Any,
    device: torch.device,
    multiply: Callable[[], object] = int,
    rounds: int = _ROUNDS,
) -> float:
    """Seconds of one run of this rank's program: the median of a few, which all ranks begin together."""
    program = schedule.programs[transport.rank]
    pieces = {name: torch.zeros(1, dtype=torch.uint8, device=device) for op in program for name in _names(op)}
    times: list[float] = []

    def mm(_: Compute) -> None:
        multiply()

    for _ in range(rounds):
        gathered(transport, [])
        start_s = time.perf_counter()
        execute(schedule, transport, pieces.__getitem__, {"mm": mm})
        synchronize(device)
        times.append(time.perf_counter() - start_s)
    return median(times)


def _names(op: Any) -> tuple[str, ...]:
    return op.reads + op.writes + op.adds if isinstance(op, Compute) else (op.send, op.recv)
