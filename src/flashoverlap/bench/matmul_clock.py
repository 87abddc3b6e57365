"""When the matmuls of a pass run: what stands in front of the first, and behind the last."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_"}


class Tails(NamedTuple):
    """What of a training step hides behind no matmul.

    Args:
        first_matmul_s: from the start of forward to the start of its first matmul.
        gradients_ready_s: from the end of the last matmul of backward until all gradients are ready.
    """

    first_matmul_s: float
    gradients_ready_s: float


class MatmulClock(TorchDispatchMode):
    """Notes when matmuls begin and end, forward and backward, while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._forward: list[tuple[float, float]] = []
        self._backward: list[tuple[float, float]] = []
        self._now = self._forward

    def turn(self) -> None:
        """From here on it is backward."""
        self._now = self._backward

    def tails(self, begin_s: float, end_s: float) -> Tails:
        """Those of a pass that began and ended at these times of ``time.perf_counter``."""
        return Tails(self._forward[0][0] - begin_s, end_s - self._backward[-1][1])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin_s = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _MATMULS:
            self._now.append((begin_s, time.perf_counter()))
        return out
