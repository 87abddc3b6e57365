"""The weights of a checkpoint of ``flashoverlap train``, read by themselves."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from .weights import match

_MODEL = "model"  # what the weights are under, beside the optimizer's state


def read_trained(path: Path, model: nn.Module) -> None:
    """Reads this rank's part of every weight into the model; all ranks call together.

    Raises:
        ValueError: the checkpoint cannot be read, or its weights are not the model's.
    """
    try:
        entries = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # a pickle of whatever the file holds
        raise ValueError(f"{path / '.metadata'} cannot be read: {' '.join(str(error).split())}") from None
    shapes = {
        name.removeprefix(f"{_MODEL}."): tuple(entry.size)
        for name, entry in entries.items()
        if name.startswith(f"{_MODEL}.") and isinstance(entry, TensorStorageMetadata)
    }
    files = match(model, shapes)
    own = {files[name]: tensor for name, tensor in model.state_dict().items()}
    try:
        load({_MODEL: own}, checkpoint_id=path)  # in place
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise ValueError(f"{path} cannot be read: {' '.join(str(first).split())}") from None
