"""What data parallelism adds to a step: gradients that fly while earlier layers are computed, and gathered weights.

Backward of three layers:

    mm    [ layer 3 ][ layer 2 ][ layer 1 ]             gradients of a layer leave when it is done,
    wire             [g3     ]  [g2     ]  [g1     ]    so those of the last one hide behind nothing

Weights of the next layer come while a layer is computed, and not earlier, so that two layers are held and no more:

    mm           [ layer 1 ][ layer 2 ][ layer 3 ]
    wire  [w1   ][w2   ]    [w3   ]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Stage(NamedTuple):
    """A layer, or what stands before or after all layers.

    Args:
        idle_s: how long the wire is free while it is computed.
        wire_s: how long its transfers take.
    """

    idle_s: float
    wire_s: float


def exposed_after(stages: Sequence[Stage]) -> float:
    """Seconds that are left of the transfers when the last stage has been computed; each stage's start at its end."""
    waiting_s = 0.0
    for stage in stages:
        waiting_s = max(0.0, waiting_s - stage.idle_s) + stage.wire_s
    return waiting_s


def exposed_before(stages: Sequence[Stage]) -> float:
    """Seconds that stages wait for transfers, each of which starts when the stage before it is entered."""
    waited_s, idle_s = 0.0, 0.0
    for stage in stages:
        waited_s += max(0.0, stage.wire_s - idle_s)
        idle_s = stage.idle_s
    return waited_s
