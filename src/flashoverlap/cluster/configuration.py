"""A model's shape from the ``config.json`` that transformers writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..architectures import MODEL_TYPES
from .models import MODELS, ModelShape

# What a model type has unless its configuration says otherwise
_TYPES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"head_norms": True, "head_dim": 128},
    "gemma": {"tied": True, "head_dim": 256},
    "gemma2": {"tied": True, "head_dim": 256, "norms": 4},
    "gemma3_text": {"tied": True, "head_dim": 256, "norms": 4, "head_norms": True},
}


def model_shape(name: str) -> ModelShape:
    """The model of this name, or of this ``config.json`` or folder with one.

    Raises:
        ValueError: no such name or file, or a configuration that is none of a model known here.
    """
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"no model or configuration file {name!r}; models: {', '.join(MODELS)}")
    try:
        configuration = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} holds no JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} holds no configuration of a model: it is nested too deeply") from None
    if not isinstance(configuration, dict):
        raise ValueError(f"{path} holds no configuration of a model")
    return from_configuration(configuration, str(path))


def from_configuration(configuration: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a configuration describes; ``name`` is what messages call it.

    Raises:
        ValueError: a model type that is not known here, or a size that is missing or no positive whole number.
    """
    kind = configuration.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"{name}: model_type {kind!r} is not known; known: {', '.join(MODEL_TYPES)}")
    if kind == "gpt2":
        return _gpt2(configuration, name)

    def size(key: str, default: int | None = None) -> int:
        return _size(configuration, name, key, default)

    of_type = _TYPES[kind]
    heads, hidden, layers = size("num_attention_heads"), size("hidden_size"), size("num_hidden_layers")
    window, sliding = _windows(configuration, kind, layers)
    bias = bool(configuration.get("attention_bias", False))
    return ModelShape(
        name,
        hidden,
        size("intermediate_size"),
        layers,
        heads,
        size("num_key_value_heads", heads),
        size("head_dim", of_type.get("head_dim", hidden // heads)),
        size("vocab_size"),
        tied=bool(configuration.get("tie_word_embeddings", of_type.get("tied", False))),
        qkv_bias=of_type.get("qkv_bias", False) or bias,
        out_bias=bias,
        mlp_bias=bool(configuration.get("mlp_bias", False)),
        norms=of_type.get("norms", 2),
        head_norms=of_type.get("head_norms", False),
        window=window,
        sliding=sliding,
    )


def _gpt2(configuration: Mapping[str, Any], name: str) -> ModelShape:
    def size(key: str, default: int | None = None) -> int:
        return _size(configuration, name, key, default)

    hidden, heads = size("n_embd"), size("n_head")
    return ModelShape(
        name,
        hidden,
        size("n_inner", 4 * hidden),
        size("n_layer"),
        heads,
        heads,
        hidden // heads,
        size("vocab_size"),
        tied=bool(configuration.get("tie_word_embeddings", True)),
        gated=False,
        positions=size("n_positions"),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        norm_bias=True,
    )


def _windows(configuration: Mapping[str, Any], kind: str, layers: int) -> tuple[int, int]:
    """Keys of a sliding window, and how many layers slide; where they are not listed, as transformers lists them."""
    unless_told = 4096 if kind in ("mistral", "gemma2", "gemma3_text") else 0
    window = configuration.get("sliding_window", unless_told) or 0
    if not window or (kind.startswith("qwen") and not configuration.get("use_sliding_window")):
        return 0, 0
    if (kinds := configuration.get("layer_types")) is not None:
        return window, list(kinds).count("sliding_attention")
    full = {"mistral": 0, "gemma2": layers // 2, "gemma3_text": layers // 6}
    if kind.startswith("qwen"):
        return window, max(0, layers - _size(configuration, kind, "max_window_layers", 28))
    return window, layers - full.get(kind, layers)


def _size(configuration: Mapping[str, Any], name: str, key: str, default: int | None) -> int:
    value = configuration.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: {key} must be a whole number of 1 or more, not {value!r}")
    return value
