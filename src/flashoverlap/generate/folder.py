"""What a checkpoint folder says of its model, without torch and without loading it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..architectures import MODEL_TYPES
from ..checkpoint_folder import CheckpointFolder

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_POSITIONS = ("max_position_embeddings", "n_positions")


@dataclass(frozen=True)
class ModelFolder:
    """A model on disk.

    Attributes:
        path: the folder with its ``config.json``: of a training run, that of its last checkpoint.
        vocab_size: None where the configuration leaves it to the class.
        max_positions: the same.
        end_tokens: any of them ends the text.
    """

    path: Path
    vocab_size: int | None
    max_positions: int | None
    end_tokens: tuple[int, ...]

    def check_length(self, prompt: int, tokens: int) -> None:
        """Raises ValueError where prompt and text are longer than the model has positions."""
        if self.max_positions is not None and prompt + tokens > self.max_positions:
            raise ValueError(
                f"a prompt of {prompt} tokens and --tokens {tokens} make {prompt + tokens}, and the model has "
                f"max_position_embeddings {self.max_positions}"
            )


def read_folder(path: Path) -> ModelFolder:
    """Looks at a model folder.

    Raises:
        ValueError: it is not there, or misses what a model needs; the message says what.
    """
    if not path.is_dir():
        raise ValueError(f"--checkpoint {path}: " + ("a file, not a folder" if path.exists() else "no such folder"))
    path = _latest(path)
    if not (path / "config.json").is_file():
        raise ValueError(f"--checkpoint {path}: there is no config.json in it")
    config = read_json(path / "config.json")
    if config.get("model_type") not in MODEL_TYPES:
        kind = config.get("model_type")
        told = "names no model_type" if kind is None else f"is of model_type {kind!r}"
        raise ValueError(f"{path / 'config.json'} {told}; known: {', '.join(MODEL_TYPES)}")
    if "quantization_config" in config:
        raise ValueError(f"{path / 'config.json'} has a quantization_config; quantized weights cannot be read")
    if not is_trained(path):
        weight_files(path)
    generation = path / "generation_config.json"
    ends = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if ends is None:
        ends = config.get("eos_token_id")
    positions = next((config[name] for name in _POSITIONS if config.get(name) is not None), None)
    return ModelFolder(
        path,
        _count(path, "vocab_size", config.get("vocab_size")),
        _count(path, "max_position_embeddings", positions),
        tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
    )


def _latest(path: Path) -> Path:
    """The last checkpoint of a training run's folder; any other folder as it is."""
    run = CheckpointFolder(path)
    if not run.is_run:
        return path
    checkpoint = run.latest()
    if checkpoint is None:
        raise ValueError(f"--checkpoint {path}: the training run has written no checkpoint yet")
    return checkpoint.path


def is_trained(path: Path) -> bool:
    """Whether a folder is one checkpoint of torch.distributed.checkpoint, as training writes it."""
    return (path / ".metadata").is_file()


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model folder.

    Raises:
        ValueError: there are none, or one that the index names is not there.
    """
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    if not (path / INDEX).is_file():
        others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in path.glob(pattern))
        found = f"; {', '.join(others[:3])} cannot be read, safetensors can" if others else ""
        raise ValueError(f"--checkpoint {path}: there is neither {WEIGHTS} nor {INDEX} in it{found}")
    names = read_json(path / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{path / INDEX} has no weight_map of names to files")
    files = [path / name for name in sorted(set(names.values()))]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ValueError(f"{path / INDEX} names {', '.join(absent[:3])}, which is not there ({len(absent)} missing)")
    return files


def read_json(file: Path) -> Mapping[str, Any]:
    """An object in a JSON file.

    Raises:
        ValueError: it cannot be read, or is none.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object")
    return content


def _count(path: Path, name: str, value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError(f"{path / 'config.json'}: {name} is {value!r}; a whole number above 0 is needed")
