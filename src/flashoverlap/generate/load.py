"""A model of a folder, each of whose ranks reads its own slices only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.module import register_module_parameter_registration_hook

import flashoverlap.torch as fo

from .folder import is_trained, weight_files
from .trained import read_trained
from .weights import Place, Read, Weights, match


def load(path: Path, mesh: DeviceMesh, dtype: torch.dtype, overlap: fo.Overlap) -> nn.Module:
    """The model of a folder in evaluation mode, tensor-parallel over a mesh; all its ranks call together.

    No rank holds or reads more than its own slices; what is replicated is read by all.

    Args:
        path: a folder in Hugging Face format, ``config.json`` and weights as safetensors, or a checkpoint of training.
        mesh: of one dimension.
        dtype: of the parameters; the files may have another.
        overlap: how the model's operators hide their communication.

    Raises:
        ValueError: the folder is no model that can be parallelized, or its weights are not those of its configuration.
    """
    model = build(path, dtype)
    if is_trained(path):
        fo.parallelize(model, mesh, sequence_parallel=False, overlap=overlap)
        fill(model, lambda name, sizes, begins: torch.empty(sizes, dtype=dtype))
        read_trained(path, model)
    else:
        weights = Weights(weight_files(path))
        files = match(model, weights.shapes)  # while names are those of the file
        fo.parallelize(model, mesh, sequence_parallel=False, overlap=overlap)
        fill(model, weights.reader(files, places(model, {name: weights.shapes[files[name]] for name in files}), dtype))
    return model.eval().requires_grad_(False)


def build(path: Path, dtype: torch.dtype) -> nn.Module:
    """The model of a ``config.json``: parameters on the meta device, and buffers with their values.

    Raises:
        ValueError: transformers does not know it, or not as a causal language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # late: takes seconds

    try:
        config: Any = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        with _parameters_on_meta():
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # transformers raises what it likes, from KeyError to its own kinds
        first = str(error).strip().partition("\n\n")[0]
        raise ValueError(f"{path / 'config.json'}: {' '.join(first.split())}") from None


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within, parameters of new modules have no memory; buffers, such as rotary frequencies, are computed as usual."""

    def without_memory(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # kept, so that what is tied stays tied
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(without_memory)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        hook.remove()


def fill(model: nn.Module, read: Read) -> None:
    """Gives parameters on the meta device, and persistent buffers, their values; what is tied stays tied.

    Args:
        model: parallelized or not.
        read: gives this rank's part of a tensor by the model's name for it, its sizes, and where it begins.
    """
    filled: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for prefix, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in filled:
                        filled[id(parameter)] = _filled(parameter, partial(read, f"{prefix}.{name}".lstrip(".")))
                    module._parameters[name] = filled[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    buffer.copy_(read(f"{prefix}.{name}".lstrip("."), buffer.shape, (0,) * buffer.dim()))


def _filled(parameter: nn.Parameter, read: Callable[[Sequence[int], Sequence[int]], torch.Tensor]) -> nn.Parameter:
    tensor: torch.Tensor = parameter.data
    if not isinstance(tensor, DTensor):
        return nn.Parameter(read(tensor.shape, (0,) * tensor.dim()))
    mesh, placements = tensor.device_mesh, tensor.placements
    here = read(*compute_local_shape_and_global_offset(tensor.shape, mesh, placements))
    made = DTensor.from_local(here, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
    return nn.Parameter(made)


def places(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> dict[str, Place]:
    """Where parts of parameters lie that parallelize has split, such as the q, k and v of GPT-2's ``c_attn``.

    Args:
        model: parallelized.
        shapes: of the tensors by their names in the model as it was.
    """
    found = {}
    for whole, module in model.named_modules():
        if isinstance(module, nn.ParameterList):
            first = 0
            for name, part in module.named_parameters():
                dim = next(dim for dim, size in enumerate(shapes[whole]) if size != part.shape[dim])
                found[f"{whole}.{name}"] = Place(whole, dim, first)
                first += part.shape[dim]
    return found
