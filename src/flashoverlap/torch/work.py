"""What a rank's own work costs: matmuls by their shape, and additions."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle, product
from statistics import median

import torch

from ..matmul import Matmul
from .wire import synchronize

_ROWS, _INNER, _OUTER = (1, 16, 128, 512), (256, 1024), (256, 1024)
_ADDED_BYTES = 8 << 20  # more than a cache holds, as pieces are
_WEIGHTS, _WEIGHT_BYTES = 3, 16 << 20  # more of them, and not more of these
_LEAST_S = 2e-3
_FEWEST, _MOST = 3, 200


class Stopwatch:
    """Times calls on one device.

    [Note: shared cores] Where ranks share cores, how long a short call takes is a matter of luck: it may have a core to
    itself or wait for one. So on a CPU a call counts by the time that its thread ran, and all by how much longer the
    whole took on the wall's clock: :attr:`sharing`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._ran_s, self._took_s = device, 0.0, 0.0
        self._clock = time.thread_time if device.type == "cpu" else time.perf_counter

    @property
    def sharing(self) -> float:
        """How much longer all that was timed took than it ran."""
        return max(1.0, self._took_s / self._ran_s)

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds that one call ran: the median over some, a few milliseconds in all."""
        work()
        synchronize(self._device)
        times: list[float] = []
        begin_s = time.perf_counter()
        while len(times) < _FEWEST or (sum(times) < _LEAST_S and len(times) < _MOST):
            start_s = self._clock()
            work()
            synchronize(self._device)
            times.append(self._clock() - start_s)
        self._took_s += time.perf_counter() - begin_s
        self._ran_s += sum(times)
        return median(times)


def product_of(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """A matmul as a linear layer does it: rows [m, k] times a weight [n, k], into a place of its own.

    Weights take turns, as layers do: one that has just been used lies in a cache that those of a step do not fit in.
    """
    generator = torch.Generator(device).manual_seed(m + n)  # the caller's own random numbers stay as they are
    x, weight = (torch.randn(rows, k, device=device, generator=generator).to(dtype) for rows in (m, n))
    out = torch.empty(m, n, dtype=dtype, device=device)
    weights = cycle([weight] + [weight.clone() for _ in range(min(_WEIGHTS, _WEIGHT_BYTES // weight.nbytes))])
    return lambda: torch.mm(x, next(weights).t(), out=out)


def matmul_seconds(dtype: torch.dtype, device: torch.device) -> dict[tuple[int, int, int], float]:
    """Seconds of a matmul for each shape of a small grid, and of one that is almost nothing: (1, 1, 1)."""
    watch, shapes = Stopwatch(device), [(1, 1, 1), *product(_ROWS, _INNER, _OUTER)]
    seconds = {shape: watch.seconds(product_of(*shape, dtype, device)) for shape in shapes}
    return {shape: each_s * watch.sharing for shape, each_s in seconds.items()}


def matmul_of(seconds: dict[tuple[int, int, int], float], memory_bytes_per_s: float) -> Matmul:
    """The cost of matmuls from those of a grid; the peak is what the best of them reaches."""
    fixed_s = seconds[1, 1, 1]
    rates = {
        (m, k, n): 2 * m * k * n / max(each_s - fixed_s, 0.02 * each_s)
        for (m, k, n), each_s in seconds.items()
        if (m, k, n) != (1, 1, 1)
    }
    peak = max(rates.values())
    return Matmul(peak, fixed_s, memory_bytes_per_s, tuple((*shape, rate / peak) for shape, rate in rates.items()))


def memory_bytes_per_s(dtype: torch.dtype, device: torch.device) -> float:
    """Bytes read and written per second by additions of large tensors."""
    count = _ADDED_BYTES // dtype.itemsize
    x, y = (torch.zeros(count, dtype=dtype, device=device) for _ in range(2))
    watch = Stopwatch(device)
    return 3 * x.nbytes / (watch.seconds(lambda: torch.add(x, y, out=x)) * watch.sharing)
