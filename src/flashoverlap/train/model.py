"""An unchanged causal language model of transformers, and the two calls that make it parallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

import flashoverlap.torch as fo

from .options import Options
from .ranks import Ranks


def build(configuration: Any, options: Options, device: torch.device) -> nn.Module:
    """The model with random weights, the same for the same seed, in float32."""
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_config(configuration, dtype=torch.float32, attn_implementation="sdpa")
    if options.activation_checkpointing:
        # the second is its name in older versions
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model.to(device).train()


def parallel(options: Options, ranks: Ranks, configuration: Any, overlap: fo.Overlap) -> nn.Module:
    """The model over all ranks, whose operators hide their communication as ``overlap`` says.

    Raises:
        ValueError: it cannot be spread over these ranks.
    """
    model = build(configuration, options, ranks.device)
    model = fo.parallelize(model, ranks.mesh, attention=options.attending, overlap=overlap)
    if options.dp > 1:
        model = fo.data_parallel(model, ranks.replicas, shard=options.sharding, overlap=overlap)
    return model


def without_memory(configuration: Any) -> nn.Module:
    """The model on the meta device: shapes only."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(configuration)
