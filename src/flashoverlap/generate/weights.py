"""Tensors in safetensors files, read slice by slice, and how they are matched with a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

_DTYPES = ("F64", "F32", "F16", "BF16")
_SHOWN = 3
_COMPUTED = r"rotary_emb\.inv_freq$"  # older files hold what the model computes itself

Read = Callable[[str, Sequence[int], Sequence[int]], torch.Tensor]  # name, sizes of the part, where it begins


class Place(NamedTuple):
    """Where a part of a tensor lies in the whole.

    Args:
        whole: name of the whole.
        dim: along which it is one of several parts.
        first: index of its first entry along that dimension.
    """

    whole: str
    dim: int
    first: int


class Weights:
    """The tensors of several files by name. Files are mapped: only what is read of them takes memory.

    Args:
        files: safetensors files.

    Raises:
        ValueError: a file cannot be read, or a tensor is of a dtype that is no weight's.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._views: dict[str, Any] = {}
        for file in files:
            try:
                opened: Any = safe_open(file, framework="pt")
                self._views |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} cannot be read as safetensors: {' '.join(str(error).split())}") from None
        for name, view in self._views.items():
            if view.get_dtype() not in _DTYPES:
                raise ValueError(
                    f"{name} {list(view.get_shape())} is {view.get_dtype()}; {', '.join(_DTYPES)} are supported, "
                    "quantized weights are not"
                )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole tensors' shapes."""
        return {name: tuple(view.get_shape()) for name, view in self._views.items()}

    def reader(self, files: Mapping[str, str], places: Mapping[str, Place], dtype: torch.dtype) -> Read:
        """Reads parts of tensors by the model's names for them.

        Args:
            files: the file's names by the model's names before it was parallelized.
            places: of the model's tensors that are parts of one in the file.
            dtype: what is read is converted to.
        """

        def read(name: str, sizes: Sequence[int], begins: Sequence[int]) -> torch.Tensor:
            place = places.get(name, Place(name, 0, 0))
            firsts = [begin + (place.first if dim == place.dim else 0) for dim, begin in enumerate(begins)]
            return self._read(files[place.whole], list(zip(firsts, sizes, strict=True)), dtype)

        return read

    def _read(self, name: str, part: Sequence[tuple[int, int]], dtype: torch.dtype) -> torch.Tensor:
        view = self._views[name]
        found = view[tuple(slice(first, first + size) for first, size in part)] if part else view[...]
        return found.to(dtype=dtype, copy=True, memory_format=torch.contiguous_format)


def match(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Which tensor of a file belongs to which of the model.

    A file may lack the names of tied parameters but one, may hold buffers that the model computes itself, and may
    leave out the prefix of the base model (``transformer.`` of GPT-2), as transformers writes it for one.

    Args:
        model: unsharded, on any device.
        shapes: of the file's tensors by name.

    Returns:
        The file's name for every name in the model's state; tied names share one.

    Raises:
        ValueError: names are missing or too many, or shapes differ; all are named, with shapes.
    """
    named = _prefixed(model, shapes)
    state: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
    found: dict[str, str] = {}
    missing, wrong = [], []
    for name, tensor in state.items():
        tied = [other for other, same in state.items() if same is tensor and other in named]
        if not tied:
            missing.append(f"{name} {list(tensor.shape)}")
            continue
        found[name] = named[name if name in tied else tied[0]]
        shape = shapes[found[name]]
        if shape != tuple(tensor.shape):
            wrong.append(f"{name} is {list(shape)} in the file and {list(tensor.shape)} by config.json")
    ignored = _ignored(model)
    unexpected = [
        f"{name} {list(shapes[own])}" for name, own in named.items() if name not in state and not ignored(name)
    ]
    faults = [_some("missing:", missing), _some("unexpected:", unexpected), _some("", wrong)]
    if any(faults):
        raise ValueError(f"the weights do not fit {type(model).__name__}: " + "; ".join(filter(None, faults)))
    return found


def _prefixed(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The file's names by what they are called in the model."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    if prefix == "." or any(name.startswith(prefix) for name in shapes):
        return {name: name for name in shapes}
    return {name if name.startswith("lm_head.") else f"{prefix}{name}": name for name in shapes}


def _ignored(model: nn.Module) -> Callable[[str], bool]:
    patterns = [_COMPUTED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    buffers = {name for name, _ in model.named_buffers()}
    return lambda name: name in buffers or any(re.search(pattern, name) for pattern in patterns)


def _some(title: str, entries: Sequence[str]) -> str:
    if not entries:
        return ""
    more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return f"{title} {', '.join(entries[:_SHOWN])}{more}".strip()
