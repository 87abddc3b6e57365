"""What ``plan="auto"`` knows: a readable table for each architecture of transformers' language models.

To add one: a table here, its ``model_type`` in architectures.py, and which table it has in TABLES. Names are patterns;
``*`` stands for one part of a name.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..architectures import MODEL_TYPES
from .modules import (
    CausalLM,
    FusedMLP,
    ParallelAttention,
    Replicated,
    SequenceParallel,
    ShardedInput,
    Style,
    VocabParallelEmbedding,
    VocabParallelHead,
)

Plan = dict[str, Style]

_LLAMA_LAYER: Plan = {
    "*_layernorm": SequenceParallel(),
    "self_attn": ParallelAttention("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": FusedMLP("up_proj", "down_proj", "gate_proj"),
}

_GPT2_LAYER: Plan = {
    "ln_*": SequenceParallel(),
    "attn": ParallelAttention(qkv="c_attn", out="c_proj"),
    "mlp": FusedMLP("c_fc", "c_proj", None, dropout="dropout"),
}

_LLAMA: Plan = {
    "": CausalLM(),
    "model.embed_tokens": VocabParallelEmbedding(looks_full=True),
    "model.layers.0": ShardedInput(),
    **{f"model.layers.*.{name}": style for name, style in _LLAMA_LAYER.items()},
    "model.norm": SequenceParallel(looks_full=True),
    "lm_head": VocabParallelHead(all_rows=True),
}

_GPT2: Plan = {
    "": CausalLM(),
    "transformer.wte": VocabParallelEmbedding(looks_full=True),
    "transformer.wpe": Replicated(),
    "transformer.drop": ShardedInput(),
    **{f"transformer.h.*.{name}": style for name, style in _GPT2_LAYER.items()},
    "transformer.ln_f": SequenceParallel(looks_full=True),
    "lm_head": VocabParallelHead(all_rows=True),
}

# by the model_type of a transformers config: the whole model, and one decoder layer by itself
TABLES: dict[str, tuple[Plan, Plan]] = {
    kind: (_GPT2, _GPT2_LAYER) if kind == "gpt2" else (_LLAMA, _LLAMA_LAYER) for kind in MODEL_TYPES
}


def auto_plan(model: nn.Module) -> Plan:
    """The table for a language model of transformers.

    Raises:
        ValueError: a model of another kind; the message says what is known.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    known = ", ".join(TABLES)
    if kind not in TABLES:
        raise ValueError(
            f"plan='auto' knows the language models of transformers of type {known}; "
            f"{type(model).__name__} {'is of type ' + repr(kind) if kind else 'has no config with a model_type'}: "
            "give a plan, a dict from module-name patterns to styles"
        )
    table = TABLES[kind][0]
    if getattr(config, "add_cross_attention", False):
        raise ValueError("plan='auto' knows no cross-attention, and this model has add_cross_attention=True")
    if not hasattr(model, "lm_head"):
        raise ValueError(
            f"plan='auto' knows language models with an lm_head, and {type(model).__name__} has none: give a plan"
        )
    return dict(table)


def layer_plan(config: Any) -> Plan:
    """The table for one decoder layer by itself, of a model with this transformers config; own rows in and out.

    Raises:
        ValueError: a model_type that is not known.
    """
    if config.model_type not in TABLES:
        raise ValueError(f"no plan for model_type {config.model_type!r}; known: {', '.join(TABLES)}")
    return dict(TABLES[config.model_type][1])
