"""A look at the wire: whether transfers take what the machine says, and another machine where they do not."""

from __future__ import annotations

from typing import Any

import torch

from ..drift import is_changed, settled, slowed
from ..machine import Machine
from . import wire
from .wire import Wire, gathered

_TRANSFER_S = 0.015
_MORE_LOOKS = 2  # that have to confirm what the first has found: it may have been other work, or the moment of change
WHAT = ("a transfer", "a transfer between nodes")


def times_as_long(transport: Any, machine: Machine, device: torch.device) -> tuple[float, ...]:
    """How many times as long as ``machine`` says a transfer takes, and one between nodes; the same on every rank.

    Collective, and some 50 ms where the machine is right. 1 where there is nothing to compare.
    """
    rank, ranks = transport.rank, transport.world_size
    if ranks == 1:
        return 1.0, 1.0
    nodes = machine.nodes if machine.uplink is not None else ()
    slowest = min(link.bytes_per_s for link in machine.links or (machine.link,))
    factors = [_factor(transport, machine, wire.inside(rank, nodes or (ranks,), 1), slowest, device), 1.0]
    if machine.uplink is not None:
        far = wire.between(rank, nodes)
        factors[1] = _factor(transport, machine, far, min(slowest, machine.uplink.bytes_per_s), device)
    return tuple(map(max, zip(*gathered(transport, factors), strict=True)))


def _factor(
    transport: Any, machine: Machine, partners: wire.Partners, bytes_per_s: float, device: torch.device
) -> float:
    """The same of a transfer that this rank receives after another one; 0 where it takes no part."""
    size = int(min(wire.MOST_BYTES, max(1, _TRANSFER_S * bytes_per_s)))
    first_s, last_s = Wire(transport, device, size).arrivals(partners, [size, size])
    return (last_s - first_s) / machine.transfer_s(size, partners.frm, transport.rank)


@torch.inference_mode(False)  # the backend's threads, which are not in it, could not write to what was made in it
def look(transport: Any, device: torch.device) -> str:
    """Looks at the wire, and plans with what it is like where that has changed; says so in a sentence, or "".

    Collective.
    """
    looks = [times_as_long(transport, transport.machine, device)]
    if any(map(is_changed, looks[0])):
        looks += (times_as_long(transport, transport.machine, device) for _ in range(_MORE_LOOKS))
    factors = [settled(each) for each in zip(*looks, strict=True)]
    told = [
        f"{what} takes {factor:.2g} times as long as before"
        for what, factor in zip(WHAT, factors, strict=True)
        if factor != 1.0
    ]
    drift = transport.drift
    if told:
        transport.use(slowed(transport.machine, *factors))
        transport.drift = drift
    drift.looked(changed=bool(told))
    return " and ".join(told)
