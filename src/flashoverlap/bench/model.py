"""A whole Llama under tensor and sequence parallelism: token ids in, the loss out."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..overlap import Overlap
from ..torch.parallelize import apply
from .case import Case
from .contestant import Contestant, Ours
from .llama import attention_of, causal_lm, in_float64
from .shapes import ModelShape


class Model(Case):
    """transformers' LlamaForCausalLM on the same ids [B, S] on every rank.

    The gradient of the loss is the number of tokens, as a loss scale would have it: the loss is a mean, and its
    gradients would be too small for the tolerances to say anything.

    Attributes:
        model: with all weights; whoever shards it takes a copy.
        ids: the tokens, and the labels.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, rank: int, world_size: int) -> None:
        self.shape, self.dtype, self.rank, self.world_size = shape, dtype, rank, world_size
        generator = torch.Generator().manual_seed(shape.seq + shape.hidden + shape.ffn)
        self.model = causal_lm(shape, dtype, generator)
        self.ids = torch.randint(shape.vocab, (shape.batch, shape.seq), generator=generator)
        self.grad = torch.tensor(float(shape.batch * shape.seq))

    def contestant(self, group: Any, transport: Any, overlap: Overlap, variant: str = "") -> Contestant:
        """The model, parallelized by the automatic table; it holds its mode, so each contestant has a copy."""
        mesh, model = DeviceMesh.from_group(group, "cpu"), copy.deepcopy(self.model)
        apply(model, mesh, transport, "auto", attention=attention_of(self.shape), overlap=overlap)
        return Ours(lambda: model(input_ids=self.ids, labels=self.ids).loss, dict(model.named_parameters()))

    def reference(self, train: bool) -> dict[str, torch.Tensor]:
        """The loss and whole gradients."""
        model = in_float64(self.model)
        with torch.set_grad_enabled(train):
            loss = model(input_ids=self.ids, labels=self.ids).loss
        found = {"out": loss.detach()}
        if train:
            loss.backward(self.grad.double())
            found |= {name: weight.grad for name, weight in model.named_parameters()}
        return found
