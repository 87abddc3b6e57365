"""One Llama decoder layer under tensor and sequence parallelism: own rows in, own rows out."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..overlap import Overlap
from ..torch.parallelize import apply
from ..torch.plans import layer_plan
from .case import Case
from .contestant import Contestant, Ours
from .llama import attention_of, config_of, decoder_layer, in_float64, rotary_positions
from .shapes import BlockShape


class Block(Case):
    """transformers' LlamaDecoderLayer on x [B, S, H]; a rank holds x [B, S_r, H] and its shards of the weights.

    Attributes:
        layer: with all weights; whoever shards it takes a copy.
        x: all rows of the input.
        full_grad: gradient of all rows of the output.
        positions: cosines and sines of all positions.
    """

    def __init__(self, shape: BlockShape, dtype: torch.dtype, rank: int, world_size: int) -> None:
        self.shape, self.dtype, self.rank, self.world_size = shape, dtype, rank, world_size
        generator = torch.Generator().manual_seed(shape.seq + shape.hidden + shape.ffn)
        rows = (shape.batch, shape.seq, shape.hidden)
        self.layer = decoder_layer(shape, dtype, generator)
        self.x, self.full_grad = (
            torch.randn(rows, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)
        )
        self.positions = rotary_positions(shape, dtype)
        self.grad = self.own(self.full_grad)

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's rows [B, S_r, H] of all [B, S, H]."""
        return torch.tensor_split(rows, self.world_size, 1)[self.rank].contiguous().clone()

    def contestant(self, group: Any, transport: Any, overlap: Overlap, variant: str = "") -> Contestant:
        """The layer, parallelized by its own table; it holds its mode, so each contestant has a copy."""
        mesh, layer = DeviceMesh.from_group(group, "cpu"), copy.deepcopy(self.layer)
        plan = layer_plan(config_of(self.shape))
        apply(layer, mesh, transport, plan, attention=attention_of(self.shape), overlap=overlap)
        x = self.own(self.x).requires_grad_()
        return Ours(lambda: layer(x, position_embeddings=self.positions), {"x": x, **dict(layer.named_parameters())})

    def reference(self, train: bool) -> dict[str, torch.Tensor]:
        """Own rows of the output and of the gradient of x, and whole gradients of the weights."""
        layer, x = in_float64(self.layer), self.x.detach().double().requires_grad_(train)
        positions = rotary_positions(self.shape, torch.float64)
        with torch.set_grad_enabled(train):
            out = layer(x, position_embeddings=positions)
        found = {"out": self.own(out.detach())}
        if train:
            out.backward(self.full_grad.double())
            assert x.grad is not None
            found["x"] = self.own(x.grad)
            found |= {name: weight.grad for name, weight in layer.named_parameters()}
        return found
