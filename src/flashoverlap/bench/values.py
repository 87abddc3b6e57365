"""Are the numbers right? Nothing is timed that has not been compared with the unsharded module in float64."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# what is allowed, for each unit of the largest value in the reference
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_TOLD = 4  # of what is wrong


def compare(
    found: Mapping[str, torch.Tensor],
    reference: Mapping[str, torch.Tensor],
    tolerance: float,
    units: Mapping[str, float] = MappingProxyType({}),
) -> tuple[float, str]:
    """The largest error of all tensors, and what is wrong in words ("" where nothing is).

    Args:
        found: by name; each name of the reference has to be there. Of a DTensor the own shard is compared.
        reference: in float64; whole where ``found`` has a DTensor.
        tolerance: allowed for each unit of a tensor's largest value, and at least for a unit.
        units: by name, where that unit is not one.
    """
    worst, complaints = 0.0, []
    for name, right in reference.items():
        mine = found.get(name)
        if mine is None or mine.shape != right.shape:
            complaints.append(f"{name} is {'missing' if mine is None else list(mine.shape)}, not {list(right.shape)}")
            continue
        if isinstance(mine, DTensor):
            mine, right = own_shards(mine, right)
        error = float((mine.detach().double() - right).abs().max()) if right.numel() else 0.0
        allowed = tolerance * max(units.get(name, 1.0), float(right.abs().max()) if right.numel() else 0.0)
        worst = max(worst, error) if error == error else error
        if not error <= allowed:  # also where it is not a number
            complaints.append(f"{name} differs by {error:.3g}, allowed is {allowed:.3g}")
    told = complaints[:_TOLD] + [f"{len(complaints) - _TOLD} more"] * (len(complaints) > _TOLD)
    return worst, "; ".join(told)


def own_shards(sharded: DTensor, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's shard of a DTensor, and what it has to be by the whole tensor; a sum that is still due is wrong."""
    sizes, offsets = compute_local_shape_and_global_offset(whole.shape, sharded.device_mesh, sharded.placements)
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return sharded.to_local(), whole
