"""An unchanged causal language model of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from .options import Options


def build(configuration: Any, options: Options, device: torch.device) -> nn.Module:
    """The model with random weights, the same for the same seed, in float32."""
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_config(configuration, dtype=torch.float32, attn_implementation="sdpa")
    if options.activation_checkpointing:
        # the second is its name in older versions
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model.to(device).train()


def without_memory(configuration: Any) -> nn.Module:
    """The model on the meta device: shapes only."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(configuration)
