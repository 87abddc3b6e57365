"""CausalLM: the whole language model of transformers, whose logits stay sharded while there is a loss to take."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..functional import vocab_parallel_cross_entropy
from .parallel import Parallel, Parallelized, become, full_state_dict, whole_value
from .style import Style
from .vocabulary import own_entries


class LanguageModel(Parallelized):
    """A model with a vocabulary-parallel head."""

    takes_one = False
    keeps_name = True

    def save_pretrained(self, save_directory: Any, **settings: Any) -> None:
        """Saves the whole model as transformers does, dense and under its own names; all ranks call, rank 0 writes."""
        state = full_state_dict(self)
        if self._parallel.rank == 0:
            base: Any = super()
            base.save_pretrained(save_directory, state_dict=state, **settings)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output; where it has no loss, the logits are gathered and whole on every rank."""
        for what in ("output_hidden_states", "output_attentions"):
            if kwargs.get(what) or getattr(self.config, what, False):
                raise ValueError(f"{what}: hidden states and attentions of a parallelized model are sharded, not whole")
        out = super().forward(*args, **kwargs)
        if isinstance(out, tuple):
            return out if kwargs.get("labels") is not None else tuple(map(whole_value, out))
        if getattr(out, "loss", None) is None:
            out.logits = whole_value(out.logits)
        return out


def causal_lm_loss(
    parallel: Parallel,
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """transformers' loss of a causal language model, of logits that are sharded by vocabulary.

    Args:
        parallel: of the model.
        logits: DTensor ``[B, S, V]``.
        labels: ``[B, S]``; row s is to predict label s + 1.
        vocab_size: V.
        num_items_in_batch: what the sum over tokens is divided by; None takes the number of valid labels.
        ignore_index: label of tokens that do not count.
        shift_labels: labels that are shifted already.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    here = logits.to_local() if isinstance(logits, DTensor) else logits
    loss = vocab_parallel_cross_entropy(
        here,
        shift_labels.to(here.device).contiguous(),
        group=parallel.group,
        first=own_entries(vocab_size, parallel).start,
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


class CausalLM(Style):
    """A language model of transformers, whose loss is taken of logits that are sharded by vocabulary."""

    def placements(self, module: nn.Module, name: str, parallel: Parallel) -> dict[str, Any]:
        return {}

    def apply(self, module: nn.Module, parallel: Parallel) -> None:
        become(module, LanguageModel, parallel)
        module.loss_function = partial(causal_lm_loss, parallel)  # pyright: ignore[reportArgumentType]
