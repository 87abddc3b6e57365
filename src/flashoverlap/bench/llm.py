"""The small Llama under data parallelism: own tokens in, their loss out."""

from __future__ import annotations

import torch
from torch import nn

from .data_parallel import DataParallel
from .llama import causal_lm, in_float64
from .shapes import LlmShape


class Llm(DataParallel):
    """transformers' LlamaForCausalLM, each rank with a sequence [1, S] of its own and the mean loss over its tokens."""

    lr = 0.5

    def __init__(self, shape: LlmShape, dtype: torch.dtype, rank: int, world_size: int) -> None:
        super().__init__(shape, dtype, rank, world_size)
        generator = torch.Generator().manual_seed(shape.layers + shape.hidden + shape.tokens)
        self.model = causal_lm(shape, dtype, generator)
        self.model.model.embed_tokens.weight.data /= 20  # as models begin, or changes would be small beside roundings
        self._ids = [torch.randint(shape.vocab, (1, shape.tokens), generator=generator) for _ in range(world_size)]

    def loss(self, model: nn.Module, rank: int) -> torch.Tensor:
        """The model's own."""
        return model(input_ids=self._ids[rank], labels=self._ids[rank]).loss

    def in_float64(self) -> nn.Module:
        """A copy in float64."""
        return in_float64(self.model)
