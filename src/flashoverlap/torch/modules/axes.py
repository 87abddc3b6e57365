"""The dimensions of a mesh that a model is parallelized over, as one rank sees them.

mesh                attention        heads and features    rows of a sequence
(tp)                as it is         over tp               over tp
(up)                ulysses          whole                 over up; attention: all rows of own heads
(up, tp)            ulysses          over tp               over up first, what that leaves over tp
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from ..transport import Silent, transport_of


class Axis(NamedTuple):
    """One dimension of a mesh.

    Args:
        group: what operators are called on along it: a process group, a mesh of this dimension, or a transport.
        rank: of this process along it.
        size: how many ranks there are along it.
    """

    group: Any
    rank: int
    size: int


class Axes(NamedTuple):
    """What a model is parallelized over.

    Args:
        mesh: on which parameters are DTensors.
        up: over which Ulysses shards the sequence; None where it does not.
        tp: over which heads and features are sharded; of one rank where they are not.
        tp_mesh: the part of the mesh that is ``tp``; None where there is none.
    """

    mesh: DeviceMesh
    up: Axis | None
    tp: Axis
    tp_mesh: DeviceMesh | None

    @property
    def all(self) -> list[Axis]:
        """Inner ones first: tp, and up where there is one."""
        return [self.tp] if self.up is None else [self.tp, self.up]

    @property
    def number(self) -> int:
        """Of this rank, among all of the mesh."""
        return self.tp.rank if self.up is None else self.up.rank * self.tp.size + self.tp.rank

    def placements(self, along_tp: Any) -> list[Any]:
        """Placements on the mesh of a parameter that has this one along tp."""
        if self.up is None:
            return [along_tp]
        return [Replicate()] if self.tp_mesh is None else [Replicate(), along_tp]


def axes_of(op: str, mesh: DeviceMesh, group: Any, attention: object) -> Axes:
    """What the dimensions of a mesh are for; the groups' transports are made in the order of the dimensions.

    Args:
        op: who asks, for error messages.
        mesh: of one dimension, or ("up", "tp").
        group: what operators are called on: the mesh, a process group or transport, or one of these for each dimension.
        attention: as parallelize takes it.

    Raises:
        ValueError: dimensions that are not known, or that ``attention`` does not go with.
    """
    names = tuple(mesh.mesh_dim_names or ())
    if mesh.ndim == 1:
        (axis,) = _axes(op, mesh, group if isinstance(group, Sequence) else [group])
        return Axes(mesh, axis, Axis(Silent(), 0, 1), None) if attention == "ulysses" else Axes(mesh, None, axis, mesh)
    if names != ("up", "tp"):
        raise ValueError(
            f"{op}: the mesh has {mesh.ndim} dimensions {names or tuple(mesh.shape)}; a model is parallelized over "
            "one, as in mesh['tp'], or over two that are named ('up', 'tp'), as in mesh['up', 'tp']"
        )
    if attention != "ulysses":
        raise ValueError(
            f"{op}: attention={attention!r} needs all rows, and a mesh ('up', 'tp') shards the sequence over up; give "
            "attention='ulysses', or mesh['tp'] for tensor parallelism alone"
        )
    up, tp = _axes(op, mesh, group if isinstance(group, Sequence) else [mesh["up"], mesh["tp"]])
    return Axes(mesh, up, tp, mesh["tp"])


def _axes(op: str, mesh: DeviceMesh, groups: Sequence[Any]) -> list[Axis]:
    """An axis for each group, whose transports are made in this order."""
    transports = [transport_of(group, op, torch.empty(0, device=mesh.device_type)) for group in groups]
    return [Axis(group, each.rank, each.world_size) for group, each in zip(groups, transports, strict=True)]
