"""What a rank's own work costs: matmuls by their shape, additions, activation functions and attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, product
from statistics import median

import torch
import torch.nn.functional as F

from ..matmul import Attention, Matmul
from .wire import synchronize

_ROWS, _INNER, _OUTER = (1, 16, 128, 512), (256, 1024), (256, 1024)
_ADDED_BYTES = 8 << 20  # more than a cache holds, as pieces are
_WEIGHTS, _WEIGHT_BYTES = 3, 16 << 20  # more of them, and not more of these
_ACTIVATED_BYTES = 2 << 20  # less than a cache holds: a kernel finds there what its matmul has just written
_HEADS, _HEAD_DIM, _QUERIES, _KEYS = 2, 64, 512, 1024
_LEAST_S, _MOST, _TURNS = 3e-3, 200, 5


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
        return self.seconds_of_each([work])[0]

    def seconds_of_each(self, works: Sequence[Callable[[], object]]) -> list[float]:
        """The same of several calls, which take turns: what else goes on for a while slows all of them alike."""
        for work in works:
            work()
        synchronize(self._device)
        times: list[list[float]] = [[] for _ in works]
        begin_s = time.perf_counter()
        for turn in range(1, _TURNS + 1):
            for mine, work in zip(times, works, strict=True):
                while len(mine) < turn or (sum(mine) < turn * _LEAST_S / _TURNS and len(mine) < turn * _MOST / _TURNS):
                    start_s = self._clock()
                    work()
                    synchronize(self._device)
                    mine.append(self._clock() - start_s)
        self._took_s += time.perf_counter() - begin_s
        self._ran_s += sum(map(sum, times))
        return [median(mine) for mine in times]


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
    seconds = watch.seconds_of_each([product_of(*shape, dtype, device) for shape in shapes])
    return {shape: each_s * watch.sharing for shape, each_s in zip(shapes, seconds, strict=True)}


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


def activation_s(dtype: torch.dtype, device: torch.device, memory_bytes_per_s: float) -> float:
    """Seconds of an activation function for one value, beside reading and writing it."""
    x = torch.linspace(-4, 4, _ACTIVATED_BYTES // dtype.itemsize, dtype=torch.float32, device=device).to(dtype)
    watch = Stopwatch(device)
    each_s = watch.seconds(lambda: F.silu(x)) * watch.sharing / x.numel()
    return max(0.0, each_s - 2 * dtype.itemsize / memory_bytes_per_s)


def attention_seconds(dtype: torch.dtype, device: torch.device) -> list[float]:
    """Seconds of an attention of some queries to all keys, forward and backward, and of all to those before them."""
    generator = torch.Generator(device).manual_seed(_KEYS)
    q, k, v, grad = (
        torch.randn(1, _HEADS, rows, _HEAD_DIM, device=device, generator=generator).to(dtype).requires_grad_()
        for rows in (_QUERIES, _KEYS, _KEYS, _QUERIES)
    )
    watch = Stopwatch(device)
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        out = F.scaled_dot_product_attention(q, k, v)
        calls: list[Callable[[], object]] = [
            lambda: F.scaled_dot_product_attention(q, k, v),
            lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True),
            lambda: F.scaled_dot_product_attention(k, k, v, is_causal=True),
        ]
        seconds = watch.seconds_of_each(calls)
    return [each_s * watch.sharing for each_s in seconds]


def with_attention(matmul: Matmul, seconds: Sequence[float], itemsize: int) -> Matmul:
    """The cost of matmuls together with that of an attention, from what :func:`attention_seconds` has found."""
    forward_s, backward_s, causal_s = seconds
    alone_s = [
        Attention(matmul, _HEADS * _HEAD_DIM, _KEYS, backward=backward, itemsize=itemsize).seconds(_QUERIES)
        for backward in (False, True)
    ]
    spared = 1 - causal_s / (forward_s * _KEYS / _QUERIES)  # at most a half, less half a block of keys
    keys_at_once = round(_KEYS * min(1.0, max(0.0, 1 - 2 * spared)))
    return replace(matmul, attention=(forward_s / alone_s[0], backward_s / alone_s[1]), keys_at_once=keys_at_once)
