"""parallelize: tensor and sequence parallelism with hidden communication, applied to a model from outside.

A plan says what becomes of which module. It is matched and looked through first, on all ranks alike; whatever cannot
work is refused then, and the model is left as it was. Only then parameters become DTensors and modules parallel ones.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ..overlap import Overlap
from .call import eager
from .check import check_overlap
from .data_parallel import apply as data_parallel
from .modules import Style
from .modules.axes import Axes, axes_of
from .modules.parallel import Parallel, Parallelized, become
from .modules.rows import Dropped
from .modules.style import Parts
from .plans import auto_plan
from .transport import CARD_BYTES, agree, refusing, transport_of

_OP = "parallelize"


@eager
def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: str | Mapping[str, Style] = "auto",
    *,
    sequence_parallel: bool = True,
    attention: str | None = None,
    overlap: Overlap = Overlap(),
) -> nn.Module:
    """Makes a model parallel in place, over tensors, over its sequence (Ulysses) or over both; its parameters become
    DTensors on ``mesh``.

    Afterwards all ranks of the mesh call the model with the same inputs, whole sequences, and get the same loss or
    logits. Gradients need no further care: those of norms are summed over the ranks that saw their rows, biases count
    once. Make the optimizer afterwards. Where dense weights differ between ranks, those of rank 0 are taken.

    Args:
        model: on any device, on "meta" too (then ``model.to_empty(device=...)`` and filling are yours).
        mesh: a DeviceMesh of one dimension, or with ``attention="ulysses"`` of two that are named ("up", "tp");
            ``mesh["tp"]`` or ``mesh["up", "tp"]`` of a larger one.
        plan: a table from module-name patterns (``*`` stands for one part of a dotted name, "" for the model itself)
            to styles, or "auto" for the language models of transformers that the library knows (plans.py).
        sequence_parallel: shard the rows outside the linears too; otherwise all ranks hold all rows there.
        attention: "query_split" cuts attention and its output projection together by queries, so that both hide the
            scatter that follows (where the model calls torch's scaled_dot_product_attention). "ulysses" shards the
            sequence over up, with whole weights there; only attention sees all of it, each rank some heads. None leaves
            attention to the model.
        overlap: how every operator is to hide its communication.

    Returns:
        The same model.

    Raises:
        ValueError, TypeError: on every rank, before anything changes: patterns that match nothing or overlap, a module
            that its style cannot take, parameters that no style takes care of, heads that the ranks cannot share, a
            plan applied twice, ranks that disagree.
    """
    settings: dict[str, Any] = {"sequence_parallel": sequence_parallel, "attention": attention, "overlap": overlap}
    return apply(model, mesh, mesh, plan, **settings)


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    group: Any,
    plan: str | Mapping[str, Style] = "auto",
    *,
    sequence_parallel: bool = True,
    attention: str | None = None,
    overlap: Overlap = Overlap(),
) -> nn.Module:
    """:func:`parallelize`, with what operators are called on given by itself: a process group or a transport, or one
    for each dimension of the mesh."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{_OP}: mesh must be a DeviceMesh, as init_device_mesh makes, not {type(mesh).__name__}")
    axes = axes_of(_OP, mesh, group, attention)
    transports = [transport_of(axis.group, _OP, torch.empty(0, device=mesh.device_type)) for axis in axes.all]
    with ExitStack() as stack:
        for transport in transports:
            stack.enter_context(refusing(transport))
        _check_settings(sequence_parallel, attention, overlap)
        parallel = Parallel(axes, sequence_parallel=sequence_parallel, attention=attention, overlap=overlap)
        matched = match(model, plan)
        placements = _look(model, matched, parallel)
    same = _agree(model, matched, placements, parallel, transports)
    _distribute(model, placements, axes, None if same else 0)
    for module, (_, style) in matched.items():
        style.apply(module, parallel)
    if sequence_parallel:
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and not isinstance(module, Parallelized):
                become(module, Dropped, parallel)
    for name, module in model.named_modules():
        if isinstance(module, Parallelized):
            module._path = name or type(model).__name__
    if axes.up is not None and axes.up.size > 1 and not any(parameter.is_meta for parameter in model.parameters()):
        sequence = mesh["up"] if mesh.ndim > 1 else mesh
        data_parallel(model, None, axes.up.group, overlap=overlap, sequence=sequence)
        parallel.averages_over_up = True
    return model


def _check_settings(sequence_parallel: object, attention: object, overlap: object) -> None:
    if not isinstance(sequence_parallel, bool):
        raise TypeError(f"{_OP}: sequence_parallel must be True or False, not {sequence_parallel!r}")
    check_overlap(_OP, overlap)
    if attention not in (None, "query_split", "ulysses"):
        raise ValueError(f"{_OP}: attention={attention!r} is unknown; known: 'query_split', 'ulysses', or None")
    if attention is not None and not sequence_parallel:
        raise ValueError(f"{_OP}: attention={attention!r} needs sequence_parallel=True")


def _agree(
    model: nn.Module,
    matched: Mapping[nn.Module, tuple[str, Style]],
    placements: Mapping[str, Any],
    parallel: Parallel,
    transports: Sequence[Any],
) -> bool:
    """Makes sure that all ranks of the mesh do the same; returns whether all have the same parameters, too."""
    told = [
        f"{n} {p.dtype} {list(p.shape)} {p.requires_grad} {placements.get(n)}"
        for n, p in _all_parameters(model).items()
    ]
    told += [f"{name} {style.words()}" for name, style in matched.values()]
    digest = hashlib.blake2b("\n".join(told).encode(), digest_size=8).hexdigest()
    settings = f"{parallel.sequence_parallel=}, {parallel.attention=}, {parallel.overlap}".replace("parallel.", "")
    size = sum(parameter.numel() for parameter in model.parameters())
    shown = f"{type(model).__name__} of {size} parameters, {settings}, plan and shapes with digest {digest}"
    card, same = _digests(model), True
    for number, transport in enumerate(transports):  # what is found out among few is told to the others
        with ExitStack() as stack:
            for outer in transports[number + 1 :]:
                stack.enter_context(refusing(outer))
            agree(transport, f"{_OP} {settings} {told}", shown)
        cards = transport.exchange_cards(card)
        same = same and len(set(cards)) == 1
        card = hashlib.blake2b(b"".join(cards), digest_size=32).digest().ljust(CARD_BYTES, b"\0")
    return same


def match(model: nn.Module, plan: str | Mapping[str, Style]) -> dict[nn.Module, tuple[str, Style]]:
    """The modules that a plan names, each with its name and its style."""
    if isinstance(plan, str):
        if plan != "auto":
            raise ValueError(f"{_OP}: plan={plan!r} is unknown; give 'auto' or a dict from patterns to styles")
        plan = auto_plan(model)
    if not isinstance(plan, Mapping):
        raise TypeError(f"{_OP}: plan must be 'auto' or a dict from patterns to styles, not {type(plan).__name__}")
    done = [name or type(model).__name__ for name, module in model.named_modules() if isinstance(module, Parallelized)]
    if done:
        raise ValueError(f"{_OP}: a plan has been applied already, to {done[0]} and {len(done) - 1} more modules")
    names = dict(model.named_modules(remove_duplicate=False))
    found: dict[nn.Module, tuple[str, Style]] = {}
    by: dict[nn.Module, str] = {}
    unmatched = []
    for pattern, style in plan.items():
        if not isinstance(style, Style):
            raise TypeError(f"{_OP}: plan[{pattern!r}] must be a style such as ColumnParallel(), not {style!r}")
        hits = [name for name in names if _fits(name, pattern)]
        if not hits:
            unmatched.append(pattern)
        for name in hits:
            module = names[name]
            if by.setdefault(module, pattern) != pattern:
                raise ValueError(f"{_OP}: {name!r} is matched by two patterns, {by[module]!r} and {pattern!r}")
            found.setdefault(module, (name, style))
    if unmatched or not found:
        raise ValueError(f"{_OP}: " + _nothing(unmatched, list(names)))
    return found


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _nothing(unmatched: list[str], names: list[str]) -> str:
    if not unmatched:
        return "the plan is empty"
    told = []
    for pattern in unmatched:
        near = difflib.get_close_matches(pattern, names, 1, 0.5)
        told.append(repr(pattern) + (f" (nearest: {near[0]!r})" if near else ""))
    return f"no module is named {', '.join(told)}"


def _look(model: nn.Module, matched: Mapping[nn.Module, tuple[str, Style]], parallel: Parallel) -> dict[str, Any]:
    """Where each parameter of the model goes; refuses what cannot work."""
    found: dict[str, Any] = {}
    takers: dict[str, str] = {}
    shared: dict[nn.Parameter, tuple[str, Any]] = {}
    names = _all_parameters(model)
    for module, (name, style) in matched.items():
        try:
            below = style.placements(module, name, parallel)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{_OP}: {name or type(model).__name__!r}: {error}") from None
        for each, placement in below.items():
            full = f"{name}.{each}" if name else each
            if full in takers:
                raise ValueError(f"{_OP}: {full!r} is taken care of by both {takers[full]!r} and {name!r}")
            takers[full] = name
            parameter = names[full]
            if isinstance(parameter, DTensor):
                raise ValueError(f"{_OP}: {full!r} is a DTensor already; apply parallelize first, then others")
            other, elsewhere = shared.setdefault(parameter, (full, placement))
            if elsewhere != placement:
                raise ValueError(f"{_OP}: {full!r} ({placement}) is tied to {other!r} ({elsewhere})")
            found[full] = placement
    left = _left(model, found, names)
    tied = next((name for name in left if names[name] in shared), None)
    if tied:
        other = shared[names[tied]][0]
        raise ValueError(f"{_OP}: {tied!r} is tied to {other!r}, and the plan says nothing of its module")
    if left:
        raise ValueError(
            f"{_OP}: the plan says nothing of {', '.join(left[:6])}{' ...' if len(left) > 6 else ''}; give their "
            "modules SequenceParallel() where they work on own rows, Replicated() where they see the same on every rank"
        )
    return found


def _left(model: nn.Module, found: Mapping[str, Any], names: Mapping[str, nn.Parameter]) -> list[str]:
    """Parameters that no style takes care of; a module that has two names is taken care of under both."""

    def place(name: str) -> tuple[nn.Module, str]:
        owner, _, last = name.rpartition(".")
        return model.get_submodule(owner), last

    taken = set(map(place, found))
    return [name for name in names if place(name) not in taken]


def _all_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter by each of its names."""
    return dict(model.named_parameters(remove_duplicate=False))


def _digests(model: nn.Module) -> bytes:
    """A card that is equal on ranks with equal parameters."""
    digest = hashlib.blake2b(digest_size=32)
    for parameter in model.parameters():
        if not parameter.is_meta:
            digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest().ljust(CARD_BYTES, b"\0")


def _distribute(model: nn.Module, placements: Mapping[str, Any], axes: Axes, source: int | None) -> None:
    """Puts DTensors where the parameters were; values come from rank ``source``, or are equal on all ranks already."""
    made: dict[nn.Parameter, Any] = {}
    names = _all_parameters(model)
    for name, placement in placements.items():
        parameter = names[name]
        new = made.get(parameter)
        if new is None:
            new = made[parameter] = _distributed(parameter, placement, axes, source)
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        if isinstance(new, nn.ParameterList):
            del module._parameters[last]
        setattr(module, last, new)


def _distributed(parameter: nn.Parameter, placement: Any, axes: Axes, source: int | None) -> Any:
    """The DTensor of a parameter, or a list of one for each part that lies in it."""

    def distributed(tensor: torch.Tensor, where: Any) -> nn.Parameter:
        made = distribute_tensor(tensor.detach().clone(), axes.mesh, axes.placements(where), src_data_rank=source)
        return nn.Parameter(made, requires_grad=parameter.requires_grad)

    if isinstance(placement, Parts):
        parts = parameter.split(placement.sizes, placement.dim)
        return nn.ParameterList(map(distributed, parts, placement.placements))
    return distributed(parameter, placement)
