"""What the optimizer sees of a sharded parameter: a DTensor of the own rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from .unit import Member


def parameter_of(own: torch.Tensor, spec: DTensorSpec, requires_grad: bool) -> nn.Parameter:
    """A parameter that is a DTensor with this local tensor."""
    return nn.Parameter(DTensor(own, spec, requires_grad=False), requires_grad=requires_grad)  # pyright: ignore[reportCallIssue]


def shard(member: Member, mesh: DeviceMesh, rank: int, apart: bool) -> None:
    """Puts a DTensor, ``Shard(0)`` on ``mesh``, where the modules have the parameter; the leaf keeps the value.

    A parameter that is sharded along dimension 0 by tensor parallelism as well is cut within its tensor-parallel shard,
    which torch calls a strided shard. With ``apart`` the shard is a copy, and the leaf has a storage of its own, which
    may be dropped.
    """
    leaf: Any = member.leaf
    if not isinstance(leaf, DTensor) and not leaf.is_contiguous():
        leaf.data = leaf.data.contiguous()  # pieces are views of rows
    meta = TensorMeta(leaf.shape, leaf.stride(), leaf.dtype)
    if isinstance(leaf, DTensor):
        inner, placements = _apart(leaf, mesh)
        cut = 1
        for size, placement in zip(() if inner is None else inner.shape, placements, strict=True):
            cut *= size if placement.is_shard(0) else 1
        outer: Any = _StridedShard(0, split_factor=cut) if cut > 1 else Shard(0)
        joined = mesh if inner is None else DeviceMesh._concatenate([mesh, inner])
        spec = DTensorSpec(joined, (outer, *placements), tensor_meta=meta)
    else:
        spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
    own = member.own(rank)
    if apart:
        own = own.clone()
        leaf.data = leaf.data.clone()
    made = member.parameter = parameter_of(own, spec, leaf.requires_grad)
    for module, name in member.places:
        module._parameters[name] = made


def _apart(leaf: Any, mesh: DeviceMesh) -> tuple[DeviceMesh | None, tuple[Any, ...]]:
    """The mesh of a DTensor without dimensions that ``mesh`` has been joined with, over which it is replicated."""
    inner = leaf.device_mesh
    joined = (mesh.mesh_dim_names or ("",))[0].split("_")
    names = [name for name in inner.mesh_dim_names or () if name not in joined]
    if not inner.mesh_dim_names or len(names) == inner.ndim:
        return inner, leaf.placements
    kept = tuple(leaf.placements[inner.mesh_dim_names.index(name)] for name in names)
    return (inner[tuple(names)] if names else None), kept
