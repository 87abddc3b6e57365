"""What plans say of a pass, to stand beside what was measured of it.

A pass is predicted to take what the plans of its calls say, the message by which ranks agree on each call, which is
timed beforehand, and what is in no call (norms, rotations, autograd): that is taken from the same pass with nothing
moved. What data parallelism moves is in flight beside all of a step, and planned with the step as a whole: there the
prediction is the step with nothing moved, what the plan says that communication adds to it, and the messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from ..report import Record
from ..torch import calibrate
from ..torch.transport import transport_of
from ..torch.wire import gathered
from ..torch.work import product_of
from .options import Options

_ROUNDS = 51


class Said(NamedTuple):
    """What one rank knows of a pass beside its time: what plans say, None without any, and what its calls took."""

    predicted_s: float | None
    in_calls_s: float


def said(records: Sequence[Record], passes: int, agreements: int, agreement_s: float) -> Said:
    """What the report says of passes in a row, shared out among them.

    Args:
        records: of the report.
        passes: how many there were.
        agreements: messages by which the ranks agreed, in all passes.
        agreement_s: seconds of one (:func:`agreement`).
    """
    steps = [record for record in records if record.op == "step"]
    in_calls_s = 0.0 if steps else sum(record.seconds for record in records) / passes
    told = [record.predicted_exposed_s if steps else record.predicted_s for record in steps or records]
    if not told or None in told:
        return Said(None, in_calls_s)
    return Said((sum(filter(None, told)) + agreements * agreement_s) / passes, in_calls_s)


def measured(options: Options, group: Any, directory: Path) -> None:
    """Measures the machine that plans of the group go by, anew, and keeps it in the directory, not in the user's cache.

    All ranks are on one host, where nobody could see the nodes. Collective.
    """
    nodes, folder = options.ranks_of_nodes if options.nodes > 1 else None, directory / f"machines{group.rank()}"
    calibrate(group, dtype=getattr(torch, options.dtype), nodes=nodes, folder=folder, anew=True)


def agreement(group: Any, barrier: Callable[[], object]) -> float:
    """Seconds that the message takes the first rank by which all agree on a call, after work that they began together.

    It is the mean, since a pass has several of them: each costs little most times, and once in a while a rank comes
    late that had to wait for a core. Collective.
    """
    multiply = product_of(128, 512, 1024, torch.float32, torch.device("cpu"))
    transport, times = transport_of(group), []
    for _ in range(_ROUNDS):
        barrier()
        multiply()
        start_s = time.perf_counter()
        gathered(transport, [])
        times.append(time.perf_counter() - start_s)
    return fmean(map(max, zip(*gathered(transport, times), strict=True)))
