"""Random numbers under tensor parallelism, whatever the seeds: different on every rank, or equal on all.

What a rank sees a part of (own rows, own heads) needs dropout masks of its own; what all ranks hold alike needs equal
ones, which they draw by themselves where all ranks of the group were seeded alike. A part's masks come from a stream
that is seeded by one number of the ordinary stream and the rank. So recomputation in an activation checkpoint, which
restores the ordinary stream, draws the same masks again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .parallel import Parallel


def _generator(device: torch.device) -> Any:
    if device.type == "cpu":
        return torch.default_generator
    return torch.get_device_module(device).default_generators[device.index or 0]


@contextmanager
def of_this_rank(parallel: Parallel, device: torch.device, wanted: bool = True) -> Iterator[None]:
    """Within, random numbers differ from rank to rank."""
    if not wanted:
        yield
        return
    generator = _generator(device)
    seed = int(torch.randint(2**62, ()))  # the ordinary stream of the CPU, which checkpoints restore as well
    parallel.outer_random.append(generator.get_state())
    generator.manual_seed(seed + parallel.axes.number)
    try:
        yield
    finally:
        generator.set_state(parallel.outer_random.pop())


@contextmanager
def of_all_ranks(parallel: Parallel, device: torch.device) -> Iterator[None]:
    """Back to the ordinary stream, inside of :func:`of_this_rank`."""
    if not parallel.outer_random:
        yield
        return
    generator = _generator(device)
    inner = generator.get_state()
    generator.set_state(parallel.outer_random[-1])
    try:
        yield
    finally:
        parallel.outer_random[-1] = generator.get_state()
        generator.set_state(inner)
