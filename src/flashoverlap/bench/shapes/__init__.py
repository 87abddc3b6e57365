"""The sizes of each workload, which are options of its command, and the bytes that it cannot do without."""

from __future__ import annotations

from .attention import AttentionShape, UlyssesShape
from .data_parallel import LlmShape, StackShape
from .llama import BlockShape, ModelShape
from .mlp import MlpShape
from .shape import Shape

SHAPES: dict[str, type[Shape]] = {
    "mlp": MlpShape,
    "attention": AttentionShape,
    "ulysses": UlyssesShape,
    "block": BlockShape,
    "model": ModelShape,
    "dp": StackShape,
    "dp_llm": LlmShape,
}

__all__ = [
    "SHAPES",
    "AttentionShape",
    "BlockShape",
    "LlmShape",
    "MlpShape",
    "ModelShape",
    "Shape",
    "StackShape",
    "UlyssesShape",
]
