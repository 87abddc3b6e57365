"""CausalLM: the whole language model of transformers, whose logits stay sharded while there is a loss to take."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..call import eager
from ..functional import all_reduce, vocab_parallel_cross_entropy
from .logits import LazyLogits, whole_logits
from .parallel import Parallel, Parallelized, become, full_state_dict
from .sequence import check_alike, of_own_up, refusing_over_up
from .style import Style
from .vocabulary import own_entries


class LanguageModel(Parallelized):
    """A model with a vocabulary-parallel head."""

    takes_one = False
    keeps_name = True

    def save_pretrained(self, save_directory: Any, **settings: Any) -> None:
        """Saves the whole model as transformers does, dense and under its own names; all ranks call, rank 0 writes."""
        state = full_state_dict(self)
        if self._parallel.axes.number == 0:
            base: Any = super()
            base.save_pretrained(save_directory, state_dict=state, **settings)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output; where it has no loss, the logits are gathered and whole on every rank."""
        for what in ("output_hidden_states", "output_attentions"):
            if kwargs.get(what) or getattr(self.config, what, False):
                raise ValueError(f"{what}: hidden states and attentions of a parallelized model are sharded, not whole")
        out = super().forward(*args, **kwargs)
        if isinstance(out, tuple):
            at = 1 if kwargs.get("labels") is not None else 0
            return (*out[:at], self._logits(out[at], at == 1), *out[at + 1 :])
        out.logits = self._logits(out.logits, getattr(out, "loss", None) is not None)
        return out

    def _logits(self, logits: torch.Tensor, has_loss: bool) -> torch.Tensor:
        """Logits as they are given: whole, or where a loss was taken of them, as they are, to be gathered if read."""
        if not has_loss:
            return whole_logits(logits, self._parallel)
        return logits if self._parallel.up is None else LazyLogits(logits, self._parallel)


@eager
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
        logits: DTensor ``[B, S, V]``; under Ulysses the rows of the own up ``[B, S_u, V]``.
        labels: ``[B, S]``; row s is to predict label s + 1.
        vocab_size: V.
        num_items_in_batch: what the sum over tokens is divided by; None takes the number of valid labels.
        ignore_index: label of tokens that do not count.
        shift_labels: labels that are shifted already.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    shift_labels = shift_labels.to(logits.device)
    count: Any = num_items_in_batch
    if parallel.up is not None:
        check_alike("CausalLM", "labels", shift_labels, parallel)
        if count is None:  # a mean over the rows of an up would count them by how many others that up has
            count = (shift_labels != ignore_index).sum().clamp(min=1)
    here = logits.to_local() if isinstance(logits, DTensor) else logits
    with refusing_over_up("CausalLM", parallel, here):
        loss = vocab_parallel_cross_entropy(
            here,
            of_own_up(shift_labels, parallel).contiguous(),
            group=parallel.group,
            first=own_entries(vocab_size, parallel).start,
            ignore_index=ignore_index,
            reduction="mean" if count is None else "sum",
        )
    if parallel.up is not None:
        loss = all_reduce(loss, **parallel.along(parallel.up))
    return loss if count is None else loss / count


class CausalLM(Style):
    """A language model of transformers, whose loss is taken of logits that are sharded by vocabulary."""

    def placements(self, module: nn.Module, name: str, parallel: Parallel) -> dict[str, Any]:
        return {}

    def apply(self, module: nn.Module, parallel: Parallel) -> None:
        become(module, LanguageModel, parallel)
        module.loss_function = partial(causal_lm_loss, parallel)  # pyright: ignore[reportArgumentType]
