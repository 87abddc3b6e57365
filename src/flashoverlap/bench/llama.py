"""transformers' own Llama modules, dense, with values that are the same on every rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from .shapes import BlockShape, LlmShape, ModelShape


def config_of(shape: BlockShape | LlmShape) -> LlamaConfig:
    """The configuration of a shape; attention is torch's scaled_dot_product_attention, causal, without a mask."""
    return LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        num_hidden_layers=shape.layers if isinstance(shape, ModelShape | LlmShape) else 1,
        vocab_size=shape.vocab if isinstance(shape, ModelShape | LlmShape) else 1,
        max_position_embeddings=shape.seq,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
    )


def attention_of(shape: BlockShape) -> str | None:
    """What parallelize is told of attention."""
    return None if shape.attention == "model" else shape.attention


def decoder_layer(shape: BlockShape, dtype: torch.dtype, generator: torch.Generator) -> LlamaDecoderLayer:
    """One decoder layer with all its weights."""
    return _filled(LlamaDecoderLayer(config_of(shape), 0), dtype, generator)


def causal_lm(shape: ModelShape | LlmShape, dtype: torch.dtype, generator: torch.Generator) -> LlamaForCausalLM:
    """The whole model with all its weights."""
    return _filled(LlamaForCausalLM(config_of(shape)), dtype, generator)


def rotary_positions(shape: BlockShape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [1, S, head_dim] of all positions."""
    rotary = LlamaRotaryEmbedding(config_of(shape))
    return rotary(torch.empty(0, dtype=dtype), torch.arange(shape.seq).unsqueeze(0))


def in_float64(module: Any) -> Any:
    """A copy of a dense module in float64 throughout."""
    module = copy.deepcopy(module)
    for parameter in module.parameters():
        parameter.data = parameter.data.double()
    return exact(module, torch.float64)


def exact(module: Any, dtype: torch.dtype) -> Any:
    """The module, made exact where its dtype is float64: transformers' norms and loss compute in float32 at most."""
    if dtype == torch.float64:
        for part in module.modules():
            if isinstance(part, LlamaRMSNorm):
                part.__class__ = _Float64Norm
        if isinstance(module, LlamaForCausalLM):
            module.loss_function = _float64_loss  # pyright: ignore[reportAttributeAccessIssue]
    return module


class _Float64Norm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def _float64_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return torch.nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.flatten())


def _filled(module: Any, dtype: torch.dtype, generator: torch.Generator) -> Any:
    """The module with fresh values, scaled so that what each layer gives is of order one."""
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.ndim == 1:
            values = 1 + values / 10  # a norm
        elif "embed" not in name:
            values /= parameter.shape[1] ** 0.5
        parameter.data = values.to(dtype)
    return exact(module, dtype)
