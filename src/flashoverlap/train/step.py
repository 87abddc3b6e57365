"""One step of training: forward and backward of every micro-batch, clipping, the optimizer."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import flashoverlap.torch as fo

from ..report import placed
from ..torch.transport import Silent, transport_of
from .learning_rate import learning_rate
from .options import Options
from .text import Text

# of torch.optim.AdamW, beside the learning rate, which every step sets
ADAMW: Mapping[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclass(frozen=True)
class Taken:
    """What a step gave: the mean loss over all its tokens, the gradient's norm before clipping, the learning rate."""

    loss: float
    grad_norm: float
    lr: float


class Training:
    """A model, its optimizer and what it reads.

    Args:
        model: parallelized; parameters in float32.
        optimizer: of its parameters.
        text: what batches are drawn from.
        options: of the run.
        replicas: of the model, over which a batch is spread: their group, or a transport; None where there is one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        text: Text,
        options: Options,
        replicas: Any = None,
    ) -> None:
        self.model, self.optimizer, self._text, self._options = model, optimizer, text, options
        self._replicas = Silent() if replicas is None else replicas
        self._device = next(model.parameters()).device

    def step(self, number: int) -> Taken:
        """Takes step ``number``, counted from 0. It depends on weights, optimizer state and the number alone."""
        options = self._options
        loss = self.forward_backward(number)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), options.clip or float("inf"))
        lr = learning_rate(number, options.lr, options.warmup_steps, options.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Taken(float(loss), float(norm.full_tensor() if isinstance(norm, DTensor) else norm), lr)

    def forward_backward(self, number: int) -> torch.Tensor:
        """Adds the gradients of the mean loss over all micro-batches of a step; returns that loss."""
        options = self._options
        replicas = transport_of(self._replicas, like=torch.empty(0, device=self._device))
        # for dropout: the same on all ranks of a replica, in all modes and after a resume; parallelize varies it where
        # it has to
        seed = f"{options.seed} {number}" + (f" {replicas.rank}" if replicas.rank else "")
        torch.manual_seed(zlib.crc32(seed.encode()))
        losses = []
        batches = self._text.step(number, options.accumulate, options.batch, options.seq, options.seed)
        for count, tokens in enumerate(batches, 1):
            ids = torch.from_numpy(tokens).to(self._device).chunk(replicas.world_size)[replicas.rank]
            half = torch.autocast(self._device.type, torch.bfloat16) if options.dtype == "bf16" else nullcontext()
            with self._exchanging(count == options.accumulate):
                with half:
                    loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
                (loss / options.accumulate).backward()  # micro-batches have equally many tokens: the mean over all
            losses.append(loss.detach().float())
        with placed("loss"):
            return fo.all_reduce(torch.stack(losses).mean(), group=replicas) / replicas.world_size

    def _exchanging(self, wanted: bool) -> Any:
        """Within, gradients are exchanged between replicas if they are wanted: of the last micro-batch, for all."""
        model: Any = self.model
        return nullcontext() if wanted or not hasattr(model, "no_sync") else model.no_sync()

    def state(self) -> dict[str, Any]:
        """Weights and optimizer, as checkpoints hold them: shards, under the names that the model has for them."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over what :meth:`state` gave, with values read anew."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
