"""The MLP under tensor and sequence parallelism: own rows in, own rows out."""

from __future__ import annotations

from typing import Any

import torch

import flashoverlap.torch as fo

from ..overlap import Overlap
from .case import Case
from .contestant import Contestant, Ours
from .shapes import MlpShape

_REFERENCE_ROWS = 512  # rows that the reference takes at a time, so that it needs little memory
_DIMS = {"x": 0, "up": 0, "gate": 0, "down": 1}  # the dimension that each tensor is sharded over
_ACTIVATIONS = {"gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}


class Mlp(Case):
    """``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))``.

    x [M, K], up and gate [F, K], down [K, F]; a rank holds x [M_r, K], up and gate [F_r, K], down [K, F_r].

    Attributes:
        full: the whole tensors by name.
        leaves: own shards by name; in a training pass they receive gradients.
    """

    def __init__(self, shape: MlpShape, dtype: torch.dtype, rank: int, world_size: int) -> None:
        self.shape, self.dtype, self.rank, self.world_size = shape, dtype, rank, world_size
        self.full, self._full_grad = _values(shape, dtype)
        self.leaves = {name: self._own(name, tensor).requires_grad_() for name, tensor in self.full.items()}
        self.grad = self._own("x", self._full_grad)

    def _own(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.tensor_split(tensor, self.world_size, _DIMS[name])[self.rank].contiguous().clone()

    def contestant(self, group: Any, transport: Any, overlap: Overlap, variant: str = "") -> Contestant:
        """All modes on the same leaves, since an operator holds none."""
        return Ours(lambda: self.forward(transport, overlap), self.leaves)

    def forward(self, group: Any, overlap: Overlap) -> torch.Tensor:
        """Own rows of the output by one ``fo.mlp``."""
        x, up, down = (self.leaves[name] for name in ("x", "up", "down"))
        gate, activation = self.leaves.get("gate"), self.shape.activation
        return fo.mlp(x, up, down, gate=gate, activation=activation, group=group, overlap=overlap)

    def reference(self, train: bool) -> dict[str, torch.Tensor]:
        """Own parts of what the unsharded module gives in float64, some rows at a time."""
        weights = {n: t.double().requires_grad_(train) for n, t in self.full.items() if n != "x"}
        outs: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        blocks = self.full["x"].split(_REFERENCE_ROWS), self._full_grad.split(_REFERENCE_ROWS)
        for rows, grad in zip(*blocks, strict=True):
            x = rows.double().requires_grad_(train)
            out = self._unsharded(x, weights)
            outs.append(out.detach())
            if train:
                out.backward(grad.double())
                assert x.grad is not None
                grads.append(x.grad)
        found = {"out": self._own("x", torch.cat(outs))}
        if train:
            found["x"] = self._own("x", torch.cat(grads))
            found |= {name: self._own(name, weight.grad) for name, weight in weights.items() if weight.grad is not None}
        return found

    def _unsharded(self, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        linear, activation = torch.nn.functional.linear, _ACTIVATIONS[self.shape.activation]
        hidden = linear(x, weights["up"])
        gated = activation(linear(x, weights["gate"])) * hidden if "gate" in weights else activation(hidden)
        return linear(gated, weights["down"])


def _values(shape: MlpShape, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The full tensors, scaled so that outputs are of order one, and the gradient of the output."""
    generator = torch.Generator().manual_seed(shape.seq + shape.hidden + shape.ffn)

    def normal(*size: int) -> torch.Tensor:
        values = torch.randn(*size, generator=generator, dtype=torch.float64)
        return (values / size[1] ** 0.5).to(dtype)

    full = {"x": normal(shape.seq, shape.hidden) * shape.hidden**0.5, "up": normal(shape.ffn, shape.hidden)}
    if shape.gated:
        full["gate"] = normal(shape.ffn, shape.hidden)
    full["down"] = normal(shape.hidden, shape.ffn)
    return full, normal(shape.seq, shape.hidden) * shape.hidden**0.5
