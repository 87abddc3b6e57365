"""data_parallel: data parallelism with hidden communication, applied to a model from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...overlap import Overlap
from ..call import eager
from ..check import check_overlap
from ..transport import agree, refusing
from .account import Account
from .channels import Channels
from .choosing import Choosing
from .engine import Engine
from .gradients import Gradients
from .journey import Way
from .linear import Fused
from .modules import Linear, Root, Sharded, alias_shards, become
from .order import digest
from .same import make_same
from .shards import shard as make_shard
from .stream import Stream, is_streamed
from .unit import Member, Unit, local
from .values import Values

_OP = "data_parallel"
SHARDS = ("none", "gradients", "parameters")
_SMALL_BYTES = 1 << 18  # a linear's weight below this is not worth exchanges of its own
_BUCKET_BYTES = 1 << 20


@eager
def data_parallel(
    model: nn.Module, mesh: DeviceMesh, *, shard: str = "none", overlap: Overlap = Overlap()
) -> nn.Module:
    """Makes a model data-parallel in place: every rank works on samples of its own, and gradients are means over ranks.

    Call it after :func:`parallelize` where both are used, and make the optimizer afterwards. Where parameters or
    buffers differ between ranks, those of rank 0 are taken. All ranks run the same number of backward passes; ``with
    model.no_sync():`` around all but the last of several adds their gradients up before they travel.

    Args:
        model: on its device, with its values.
        mesh: a DeviceMesh of one dimension; ``mesh["dp"]`` of a larger one.
        shard: "none" keeps parameters, gradients and optimizer states whole on every rank, with the same bits.
            "gradients" shards gradients and optimizer states (ZeRO-2): parameters are DTensors, ``Shard(0)`` on the
            mesh, and after an optimizer's step their values are gathered under the next forward. "parameters" keeps
            the weights of linears sharded as well (ZeRO-3): each is gathered for the matmuls that use it, in forward
            and again in backward, and dropped after them.
        overlap: how to hide the exchanges. ``splits`` cuts each rank's block of a linear's weight.

    Returns:
        The same model.

    Raises:
        ValueError, TypeError: on every rank, before anything changes: parameters without values, a model that is
            data-parallel already, ranks that disagree.
    """
    joined = with_sequence(model, mesh)
    return apply(model, joined, joined, shard=shard, overlap=overlap)


def with_sequence(model: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
    """The mesh, joined with that of the ranks which share sequences (Ulysses), where parallelize has spread them.

    Those ranks' gradients are means already, made by the engine that the one of the joined mesh takes the place of.
    """
    sequence = model._engine.sequence if isinstance(model, Root) else None
    if sequence is None or not isinstance(mesh, DeviceMesh):
        return mesh
    names = "_".join((*(mesh.mesh_dim_names or ()), *(sequence.mesh_dim_names or ())))
    return DeviceMesh._concatenate([mesh, sequence])._flatten(names)


def apply(
    model: nn.Module,
    mesh: DeviceMesh | None,
    group: Any,
    *,
    shard: str = "none",
    overlap: Overlap = Overlap(),
    divisor: float | None = None,
    small_bytes: int = _SMALL_BYTES,
    sequence: DeviceMesh | None = None,
) -> nn.Module:
    """:func:`data_parallel` with the group given by itself, a process group or a transport.

    Args:
        mesh: what DTensors are made on; None will do for ``shard="none"``.
        divisor: what sums of gradients are divided by: the number of ranks unless given, 1 for plain sums.
        small_bytes: parameters below this travel in buckets.
        sequence: where these ranks share sequences (Ulysses), their mesh; data_parallel may add others to them later.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_OP}: model must be an nn.Module, not {type(model).__name__}")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{_OP}: mesh must be a DeviceMesh, as init_device_mesh makes, not {type(mesh).__name__}")
    device = next((local(parameter).device for parameter in model.parameters()), torch.device("cpu"))
    channels = Channels(_OP, group, torch.device("cpu") if device.type == "meta" else device, shard == "parameters")
    transport = channels.reduce
    with refusing(transport):
        _check(model, mesh, shard, overlap)
        members = _members(model, channels.world_size)
    divisor = float(channels.world_size if divisor is None else divisor)
    name, settings = type(model).__name__, f"shard={shard} {overlap} divisor={divisor} small={small_bytes}"
    told = [f"{m.name} {m.leaf.dtype} {m.shape} {m.leaf.requires_grad} {len(m.places)}" for m in members]
    shown = f"{name} of {len(members)} parameters with digest {digest(told)}, {settings}"
    agree(transport, f"{_OP} {settings} {told}", f"{_OP} of {shown}")
    buffers = [local(buffer) for buffer in model.buffers() if not buffer.is_meta]
    make_same(transport, [*(member.value for member in members), *buffers])
    account = Account(name, overlap, channels.world_size)
    units = _units(members, channels.world_size, account, overlap, shard, small_bytes)
    way = Way(account.pattern, 1.0 / divisor, getattr(torch, overlap.accumulate_dtype))
    gradients = Gradients(name, units, channels, way, account)
    streamed = [unit for unit in units if is_streamed(unit, shard)]
    for unit in units:
        for member in unit.members if unit.sharded else ():
            assert mesh is not None
            make_shard(member, mesh, channels.rank, unit in streamed)
    whole = [unit for unit in units if unit.sharded and unit not in streamed]
    values = Values(name, whole, channels, account) if whole else None
    stream = Stream(name, streamed, channels, account) if streamed else None
    gradients.choosing = Choosing(units, channels, account, shard, overlap)
    engine = Engine(units, channels, gradients, values, stream, account)
    engine.sequence = sequence
    _change(model, engine)
    return model


def _check(model: nn.Module, mesh: DeviceMesh | None, shard: object, overlap: object) -> None:
    check_overlap(_OP, overlap)
    if shard not in SHARDS:
        raise ValueError(f"{_OP}: shard={shard!r} is unknown; known: {', '.join(SHARDS)}")
    if shard != "none" and mesh is None:
        raise ValueError(f"{_OP}: shard={shard!r} makes DTensors, which need a mesh")
    roots = [module for module in model.modules() if isinstance(module, Root)]
    if roots and (roots != [model] or roots[0]._engine.sequence is None):
        raise ValueError(f"{_OP}: this model, or a part of it, is data-parallel already")
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise ValueError(f"{_OP}: {empty[0]!r} and {len(empty) - 1} more parameters are on 'meta' and have no values")


def _members(model: nn.Module, ranks: int) -> list[Member]:
    """Every floating-point parameter once, with all its places, in the order of registration."""
    found: dict[nn.Parameter, tuple[str, list[tuple[nn.Module, str]]]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                full = f"{prefix}.{name}" if prefix else name
                found.setdefault(parameter, (full, []))[1].append((module, name))
    return [Member(name, parameter, places, ranks) for parameter, (name, places) in found.items()]


def _units(
    members: Sequence[Member], ranks: int, account: Account, overlap: Overlap, shard: str, small_bytes: int
) -> list[Unit]:
    """Large parameters travel alone, others in buckets of neighbours."""
    units: list[Unit] = []
    bucket: list[Member] = []

    def kind(member: Member) -> tuple[Any, ...]:
        return member.leaf.dtype, member.value.device, member.leaf.requires_grad, shard != "none" and bool(member.shape)

    def add(group: list[Member], linear: bool = False) -> None:
        first = not any(unit.linear and unit.is_trained for unit in units)
        parts = splits_of(group[0], ranks, overlap, first) if linear and account.decomposed else 1
        sharded = kind(group[0])[-1]
        units.append(Unit(len(units), group, ranks, parts=parts, sharded=sharded, linear=linear))

    def close() -> None:
        if bucket:
            add(bucket.copy())
            bucket.clear()

    for member in members:
        size = member.value.nbytes
        linear = is_linear_weight(member)
        if size >= small_bytes and (linear or size >= _BUCKET_BYTES):
            add([member], linear)
            continue
        if bucket and (kind(bucket[0]) != kind(member) or sum(m.value.nbytes for m in bucket) + size > _BUCKET_BYTES):
            close()
        bucket.append(member)
    close()
    return units


def is_linear_weight(member: Member) -> bool:
    """Whether a parameter is the weight of one plain nn.Linear and of nothing else."""
    (module, name), leaf = member.places[0], member.leaf
    plain = type(module).forward is nn.Linear.forward and name == "weight" and not isinstance(leaf, DTensor)
    return plain and len(member.places) == 1 and leaf.is_contiguous() and leaf.dim() == 2


_SPLIT_BYTES = 1 << 19
_SPLIT_ROWS = 512
_MOST_SPLITS = 4


def splits_of(member: Member, ranks: int, overlap: Overlap, first: bool) -> int:
    """Parts of a rank's block: as asked, or no more than four that leave matmuls enough rows; one a row at most.

    Behind the gradient of the first trained linear, and before its weight is used, nothing else hides what travels:
    there a part is half a megabyte, though its matmuls lose some 5 %. Among more than two ranks there are two parts at
    least: what is in flight holds the more memory, the larger a part is.
    """
    rows = max(1, *member.rows)
    least = 2 if ranks > 2 else 1
    fine = member.value.nbytes // ranks // _SPLIT_BYTES if first else rows // _SPLIT_ROWS
    wanted = overlap.splits or min(_MOST_SPLITS, max(least, fine))
    return max(1, min(wanted, rows))


def _change(model: nn.Module, engine: Engine) -> None:
    """Makes modules what they are to be; the model itself last, in front of all else."""
    by_module: dict[nn.Module, dict[str, Member]] = {}
    for unit in engine.units:
        for member in unit.members:
            for module, name in member.places if unit.sharded else ():
                by_module.setdefault(module, {})[name] = member
    for unit in engine.units:
        if unit.linear:
            module = unit.members[0].places[0][0]
            source = engine.stream if engine.stream is not None and engine.stream.has(unit) else engine.values
            become(module, Linear, _engine=engine, _fused=Fused(unit, engine.gradients, source))
    for module, members in by_module.items():
        become(module, Sharded, names=tuple(members), _engine=engine, _members=members)
        module._register_state_dict_hook(alias_shards)
    if isinstance(model, Root):
        model._engine.released = True
    become(model, Root, _engine=engine)
