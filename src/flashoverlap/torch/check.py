"""Arguments that cannot work are refused here, with the numbers in the message, before anything moves."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..overlap import Overlap

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_overlap(op: str, overlap: object) -> None:
    """Raises TypeError unless ``overlap`` is an Overlap."""
    if not isinstance(overlap, Overlap):
        raise TypeError(f"{op}: overlap must be a flashoverlap.Overlap, not {overlap!r}")


def check_tensors(
    op: str, x: object, weights: Sequence[object] = (), biases: Sequence[object] = (), called: str = "x"
) -> None:
    """Raises TypeError for what is no plain floating-point tensor, or not of one dtype and device."""
    named = [(called, x), *(("weight", w) for w in weights), *(("bias", b) for b in biases if b is not None)]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, not {type(tensor).__name__}")
        if isinstance(tensor, DTensor):
            raise TypeError(f"{op}: {name} is a DTensor; give its shard, {name}.to_local()")
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{op}: {name} is {tensor.dtype}; float64, float32, float16 and bfloat16 are supported")
        if tensor.layout != torch.strided:
            raise TypeError(f"{op}: {name} has layout {tensor.layout}; torch.strided is needed")
    assert isinstance(x, torch.Tensor)
    for name, tensor in named[1:]:
        assert isinstance(tensor, torch.Tensor)
        if tensor.dtype != x.dtype:
            raise TypeError(
                f"{op}: {called} is {x.dtype} and {name} is {tensor.dtype}; one dtype is needed, as in nn.Linear"
            )
        if tensor.device != x.device:
            raise ValueError(f"{op}: {called} is on {x.device} and {name} on {tensor.device}")


def check_rows(op: str, x: torch.Tensor) -> None:
    """Raises ValueError unless ``x`` is ``[..., M, K]``."""
    if x.dim() < 2:
        raise ValueError(f"{op}: x {tuple(x.shape)} needs two dimensions or more: rows and features")


def check_linear(op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises ValueError unless ``x [..., K]``, ``weight [N, K]`` and ``bias [N]`` fit together."""
    check_rows(op, x)
    check_weight(op, weight, bias)
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{op}: x {tuple(x.shape)} and weight {tuple(weight.shape)} differ in the number of input features"
        )


def check_weight(op: str, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises ValueError unless ``weight [N, K]`` and ``bias [N]`` fit together."""
    if weight.dim() != 2:
        raise ValueError(f"{op}: weight {tuple(weight.shape)} must have two dimensions [out, in]")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(
            f"{op}: bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}: ({weight.shape[0]},) is needed"
        )


def check_dim(op: str, x: torch.Tensor, dim: object) -> int:
    """The dimension of the sharded rows, counted from the front; it must not be that of the features."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"{op}: dim must be a whole number, not {dim!r}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{op}: dim={dim} does not exist in x {tuple(x.shape)}")
    if dim % x.dim() == x.dim() - 1:
        raise ValueError(f"{op}: dim={dim} of x {tuple(x.shape)} holds the features; rows are sharded, not features")
    return dim % x.dim()


def check_layer(
    op: str, x: object, weight: object, bias: object, dim: object, overlap: object
) -> tuple[list[Any], int]:
    """Checks one linear layer's arguments; returns (x, weight, bias) after autocast, and ``dim`` from the front."""
    check_overlap(op, overlap)
    cast: list[Any] = autocast(x, weight, bias)  # pyright: ignore[reportArgumentType]
    check_tensors(op, cast[0], cast[1:2], cast[2:])
    check_linear(op, *cast)
    return cast, check_dim(op, cast[0], dim)


def check_layers(
    op: str, x: object, weight: object, bias: object, dim: object, overlap: object
) -> tuple[Any, list[Any], list[Any], int]:
    """The same for one layer or a sequence of them on one ``x``: (x, weights, biases) after autocast, and ``dim``."""
    check_overlap(op, overlap)
    weights = list(weight) if isinstance(weight, Sequence) else [weight]
    if not weights:
        raise ValueError(f"{op}: weight_shard is an empty sequence")
    biases = list(bias) if isinstance(bias, Sequence) else [bias] + [None] * (len(weights) - 1)
    if len(biases) != len(weights) or (bias is not None and isinstance(bias, Sequence) != isinstance(weight, Sequence)):
        raise ValueError(f"{op}: {len(weights)} weights and {len(biases)} biases; give one bias (or None) a weight")
    x, *cast = autocast(x, *weights, *biases)  # pyright: ignore[reportArgumentType]
    weights, biases = cast[: len(weights)], cast[len(weights) :]
    check_tensors(op, x, weights, biases)
    for each, its_bias in zip(weights, biases, strict=True):
        check_linear(op, x, each, its_bias)  # pyright: ignore[reportArgumentType]
    return x, weights, biases, check_dim(op, x, dim)  # pyright: ignore[reportArgumentType]


def autocast(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The tensors as nn.Linear would see them under autocast: cast to its dtype, but for float64."""
    first = next((t for t in tensors if isinstance(t, torch.Tensor)), None)
    if first is None or not torch.is_autocast_enabled(first.device.type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(first.device.type)

    def cast(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(dtype)

    return [cast(tensor) for tensor in tensors]


def digest(tensor: torch.Tensor) -> int:
    """A number of 56 bits that tells the values of integer tensors apart, as ranks can tell each other."""
    values = tensor.detach().cpu().contiguous().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(values, digest_size=7).digest(), "little")


def shape(tensor: torch.Tensor | None) -> str:
    """A tensor's shape for a message."""
    return "none" if tensor is None else str(list(tensor.shape))


def grads(*tensors: torch.Tensor | None) -> str:
    """Which of the tensors want a gradient, as a word that must be the same on every rank."""
    enabled = torch.is_grad_enabled()
    return "grads=" + "".join("1" if enabled and t is not None and t.requires_grad else "0" for t in tensors)
