"""An all-to-all that flies while others compute, in both directions of autograd, by torch.distributed's own call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Waits:
    """How long a program has stood waiting for its collectives."""

    seconds: float = 0.0


class AllToAll:
    """One all-to-all of flat buffers.

    [Note: both ways] ``start`` and ``arrived`` are two nodes of the graph. Backward, the gradient of what has arrived
    starts its way back at the node of ``arrived``, and is waited for at that of ``start``. What flies is no tensor of
    the graph, so nobody can read it; an empty one stands between the nodes. Autograd runs what is ready from the node
    that was made last to the one that was made first. So where slices are started one after another before the first
    is waited for, the gradients of all are started before the first of them is waited for.

    Args:
        group: the process group.
        sent: elements for each rank.
        received: elements from each rank.
        waits: is told how long the program waits.
    """

    def __init__(self, group: Any, sent: Sequence[int], received: Sequence[int], waits: Waits) -> None:
        self._group, self._waits = group, waits
        self.sent, self.received = list(sent), list(received)
        self._started: torch.Tensor | None = None
        self._flying: tuple[Any, torch.Tensor] | None = None

    def start(self, flat: torch.Tensor) -> AllToAll:
        """Starts to send a contiguous buffer, the parts for the ranks one after another."""
        self._started = _Start.apply(flat, self)
        return self

    def arrived(self) -> torch.Tensor:
        """What the ranks have sent, one part after another."""
        started, self._started = self._started, None  # the graph leads from it to this object
        found: Any = _Arrived.apply(started, self)
        return found

    def post(self, flat: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Lets a buffer fly; gives what stands for it in the graph."""
        into = flat.new_empty(sum(received))
        # what torch.distributed.all_to_all_single(..., async_op=True) calls; the work keeps what is sent
        self._flying = self._group.alltoall_base(into, flat, received, sent), into
        return flat.new_empty(0)

    def finish(self) -> torch.Tensor:
        """Waits for what was posted."""
        assert self._flying is not None
        (work, into), self._flying = self._flying, None
        start_s = time.perf_counter()
        work.wait()
        self._waits.seconds += time.perf_counter() - start_s
        return into


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: torch.Tensor, exchange: AllToAll) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.post(flat, exchange.sent, exchange.received)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.exchange.finish(), None


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: torch.Tensor, exchange: AllToAll) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.finish()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        exchange = ctx.exchange
        return exchange.post(grads[0].contiguous(), exchange.received, exchange.sent), None
