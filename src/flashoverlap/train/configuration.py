"""Which model is trained: a small Llama, or what a config.json of transformers describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..architectures import MODEL_TYPES
from .text import VOCABULARY

# about 23 million parameters: a step of 2,048 tokens takes two CPU cores some two seconds
SMALL: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
# what says nothing of the weights' shapes or of what is computed with them
_UNIMPORTANT = {"transformers_version", "architectures", "_name_or_path", "dtype", "torch_dtype", "use_cache"}


def read_configuration(model: str) -> Any:
    """The configuration that ``--model`` names, as transformers has it.

    Raises:
        ValueError: no such file, not a model's configuration, an unknown type, or a vocabulary below 256.
    """
    content = dict(SMALL) if model == "small" else _read(Path(model))
    kind = content.pop("model_type", None)
    if "quantization_config" in content:
        raise ValueError(f"--model {model}: a quantized model (quantization_config) cannot be trained")
    if kind not in MODEL_TYPES:
        raise ValueError(f"--model {model}: model_type {kind!r} is unknown; known: {', '.join(MODEL_TYPES)}")
    from transformers import AutoConfig  # late: takes seconds to load

    try:
        configuration = AutoConfig.for_model(kind, **content)
    except Exception as error:  # whatever a configuration class makes of a strange value
        raise ValueError(f"--model {model}: {' '.join(str(error).split())}") from None
    if configuration.vocab_size < VOCABULARY:
        raise ValueError(
            f"--model {model}: a vocabulary of {configuration.vocab_size} does not hold the {VOCABULARY} byte values"
        )
    return configuration


def check_length(model: str, configuration: Any, seq: int) -> None:
    """Raises ValueError where the model has fewer positions than a sequence has tokens."""
    positions = getattr(configuration, "max_position_embeddings", None)
    if positions is not None and seq > positions:
        raise ValueError(f"--seq {seq}: the model {model} has {positions} positions")


def fields_of(configuration: Any) -> dict[str, Any]:
    """What makes this model another one than others, field by field, as JSON has it."""
    content = json.loads(configuration.to_json_string(use_diff=False))
    return {name: value for name, value in sorted(content.items()) if name not in _UNIMPORTANT}


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first field that differs, with both values; None where two models are the same."""
    for name in sorted({*mine, *theirs}):
        if mine.get(name) != theirs.get(name):
            return f"{name} is {theirs.get(name)!r} there and {mine.get(name)!r} here"
    return None


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        path = path / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--model {path}: {error.strerror}; give small or the path of a config.json") from None
    except ValueError:
        raise ValueError(f"--model {path}: not a JSON file") from None
    if not isinstance(content, dict):
        raise ValueError(f"--model {path}: a config.json holds an object, not a {type(content).__name__}")
    return content
