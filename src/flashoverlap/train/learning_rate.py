"""The learning rate of each step."""

from __future__ import annotations

import math

_LAST = 0.1  # of the highest


def learning_rate(step: int, highest: float, warmup: int, steps: int) -> float:
    """Climbs in a line over ``warmup`` steps, then falls along a cosine to a tenth; steps count from 0."""
    if step < warmup:
        return highest * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return highest * (_LAST + (1 - _LAST) * (1 + math.cos(math.pi * min(done, 1.0))) / 2)
