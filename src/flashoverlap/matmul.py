"""How long a matmul takes on one device, by its shape: a peak, a share of it that depends on the shape, and memory."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product


def check_number(what: str, value: float, *, positive: bool = False, infinite: bool = False) -> None:
    """Raises ValueError unless ``value`` is a number >= 0 (> 0 if ``positive``), and finite unless ``infinite``."""
    right = value > 0 if positive else value >= 0
    if not right or (math.isinf(value) and not infinite):
        kind = "a number above 0" if positive else "a finite number of 0 or more"
        raise ValueError(f"{what} must be {kind}, not {value!r}")


@dataclass(frozen=True)
class Matmul:
    """Seconds of ``[m, k] x [k, n]``: ``fixed_s`` and the longer of arithmetic and memory traffic.

    Args:
        flops_per_s: the peak, a multiplication and an addition counted as two.
        fixed_s: what every call costs.
        memory_bytes_per_s: at which both inputs are read and the output is written, once each.
        efficiency: ``(m, k, n, share of the peak)`` at the points of a grid: every combination of its sizes, once. In
            between the share is interpolated linearly in the logarithms of m, k and n; outside it is that of the
            nearest edge. One point is the same share everywhere, none the whole peak.
        activation_s: what an activation function costs for each value, beside reading and writing it.
        attention: how many times as long as its matmuls alone attention takes, forward and backward.
        keys_at_once: keys that attention works on at once: a causal mask spares it whole blocks of them only.

    Raises:
        ValueError: a number is out of its range, or the points are no whole grid.
    """

    flops_per_s: float
    fixed_s: float = 0.0
    memory_bytes_per_s: float = math.inf
    efficiency: tuple[tuple[float, float, float, float], ...] = ()
    activation_s: float = 0.0
    attention: tuple[float, float] = (1.0, 1.0)
    keys_at_once: int = 0

    def __post_init__(self) -> None:
        check_number("flops_per_s", self.flops_per_s, positive=True)
        for name in ("fixed_s", "activation_s", "keys_at_once"):
            check_number(name, getattr(self, name))
        object.__setattr__(self, "attention", tuple(self.attention))
        if len(self.attention) != 2:
            raise ValueError(f"attention is (forward, backward), not {self.attention!r}")
        for slowness in self.attention:
            check_number("attention", slowness, positive=True)
        check_number("memory_bytes_per_s", self.memory_bytes_per_s, positive=True, infinite=True)
        object.__setattr__(self, "efficiency", tuple(tuple(point) for point in self.efficiency))
        for point in self.efficiency:
            if len(point) != 4:
                raise ValueError(f"a point of efficiency is (m, k, n, share), not {point!r}")
            for what, value in zip(("m", "k", "n", "a share"), point, strict=True):
                check_number(f"{what} of efficiency", value, positive=True)
        points = {point[:3] for point in self.efficiency}
        if len(points) < len(self.efficiency) or (self.efficiency and points != set(product(*self._axes))):
            sizes = " x ".join(str(len(axis)) for axis in self._axes)
            raise ValueError(
                f"efficiency needs one point for each combination of its sizes, {sizes}, not {len(self.efficiency)}"
            )

    @cached_property
    def _axes(self) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(sorted({point[axis] for point in self.efficiency})) for axis in range(3))

    @cached_property
    def _shares(self) -> Mapping[tuple[float, ...], float]:
        return {point[:3]: point[3] for point in self.efficiency}

    def share(self, m: float, k: float, n: float) -> float:
        """Share of the peak that a matmul of this shape reaches."""
        if not self.efficiency:
            return 1.0
        ends = [_between(axis, size) for axis, size in zip(self._axes, (m, k, n), strict=True)]
        return sum(
            self._shares[tuple(size for size, _ in corner)] * math.prod(weight for _, weight in corner)
            for corner in product(*ends)
        )

    def seconds(self, m: float, k: float, n: float, itemsize: int = 4) -> float:
        """Seconds of one call on elements of ``itemsize`` bytes; an empty one costs ``fixed_s``."""
        if not (m and k and n):
            return self.fixed_s
        arithmetic_s = 2 * m * k * n / (self.flops_per_s * self.share(m, k, n))
        memory_s = (m * k + k * n + m * n) * itemsize / self.memory_bytes_per_s
        return self.fixed_s + max(arithmetic_s, memory_s)


def _between(axis: Sequence[float], size: float) -> list[tuple[float, float]]:
    """The sizes of ``axis`` around ``size`` (the nearest, outside), each with its weight."""
    above = bisect_right(axis, size)
    if above in (0, len(axis)):
        return [(axis[min(above, len(axis) - 1)], 1.0)]
    low, high = axis[above - 1], axis[above]
    weight = math.log(size / low) / math.log(high / low)
    return [(low, 1 - weight), (high, weight)] if weight else [(low, 1.0)]


@dataclass(frozen=True)
class Product:
    """A matmul inside a kernel: the rows that the kernel reads times ``[k, n]``.

    Args:
        matmul: what the device needs for it.
        k: features of a row.
        n: features of a result's row.
        itemsize: bytes of an element.
        summed: the rows are summed over instead, as in a weight gradient: ``[k, rows] x [rows, n]``.
        turned: the rows are those of a weight, as where pieces are cut along features: ``[n, k] x [k, rows]``.
    """

    matmul: Matmul
    k: int
    n: int
    itemsize: int = 4
    summed: bool = False
    turned: bool = False

    def seconds(self, rows: int) -> float:
        """Seconds of one call on ``rows`` rows."""
        m, k, n = (self.k, rows, self.n) if self.summed else (rows, self.k, self.n)
        return self.matmul.seconds(*((n, k, m) if self.turned else (m, k, n)), self.itemsize)


@dataclass(frozen=True)
class Attention:
    """Attention inside a kernel, which reads the rows of some queries; those that it reads lie one after another.

    Args:
        matmul: what the device needs for it.
        features: of a query's row, all heads together.
        keys: of the sequence.
        causal: a query meets the keys up to its own, half of all on average.
        backward: its gradients: five matmuls in place of two.
        itemsize: bytes of an element.
    """

    matmul: Matmul
    features: int
    keys: int
    causal: bool = False
    backward: bool = False
    itemsize: int = 4

    def seconds(self, rows: int) -> float:
        """Seconds of one call on ``rows`` queries."""
        met = self.keys / 2 + min(rows, self.matmul.keys_at_once, self.keys) / 2 if self.causal else self.keys
        to_keys_s = self.matmul.seconds(rows, self.features, met, self.itemsize)
        from_keys_s = self.matmul.seconds(rows, met, self.features, self.itemsize)
        return self.matmul.attention[self.backward] * (5 * to_keys_s if self.backward else to_keys_s + from_keys_s)
