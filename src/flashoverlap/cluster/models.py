"""Shapes of language models by name: what an estimate needs to know of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer in numbers.

    Args:
        hidden: features of a token between layers.
        ffn: hidden features of the MLP.
        layers: how many.
        heads, kv_heads: query heads, and key and value heads.
        head_dim: features of a head.
        vocab: rows of the embedding.
        tied: the head uses the embedding's weight.
        gated: the MLP is ``down(act(gate(x)) * up(x))``, three matrices, and not two.
        positions: rows of a learned position embedding; 0 for rotary ones.
        qkv_bias, out_bias, mlp_bias: the projections to q, k and v, that of the attention's output, or the MLP's
            linears have a bias.
        norms: normalizations of a layer over ``hidden``; ``norm_bias``: they have a bias too.
        head_norms: q and k are normalized over ``head_dim``.
        window: keys that a query of a sliding layer looks at; ``sliding``: how many of the layers slide.
        parameters_published: what the authors print, where they do.
    """

    name: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    gated: bool = True
    positions: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norms: int = 2
    norm_bias: bool = False
    head_norms: bool = False
    window: int = 0
    sliding: int = 0
    parameters_published: float = 0.0

    @property
    def q_features(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_features(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of one layer."""
        attention = self.hidden * (2 * self.q_features + 2 * self.kv_features)
        return attention + self.hidden * self.ffn * (3 if self.gated else 2)

    @property
    def head_weights(self) -> int:
        """Elements of the matrix that makes logits."""
        return self.vocab * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Elements of all that one layer learns."""
        biases = (self.q_features + 2 * self.kv_features) * self.qkv_bias + self.hidden * self.out_bias
        biases += (self.hidden + self.ffn * (2 if self.gated else 1)) * self.mlp_bias
        norms = self.norms * self.hidden * (2 if self.norm_bias else 1) + 2 * self.head_dim * self.head_norms
        return self.layer_weights + biases + norms

    @property
    def embedding_parameters(self) -> int:
        """Elements of the embeddings, and of the head where it is not tied."""
        return self.head_weights * (1 if self.tied else 2) + self.positions * self.hidden

    @property
    def parameters(self) -> int:
        """Elements of all that the model learns."""
        final_norm = self.hidden * (2 if self.norm_bias else 1)
        return self.layers * self.layer_parameters + self.embedding_parameters + final_norm

    def mean_keys(self, seq: int) -> float:
        """Keys that a query looks at under a causal mask, averaged over the sequence and the layers."""
        window = min(seq, self.window or seq)
        slid = (window * (window + 1) / 2 + (seq - window) * window) / seq
        return (self.sliding * slid + (self.layers - self.sliding) * (seq + 1) / 2) / self.layers

    def flops_per_token(self, seq: int) -> float:
        """Floating-point operations of forward and backward for one token, nothing computed twice counted twice.

        Six for each weight of a matrix (an embedding that is looked up costs none), and 12 for each feature of the
        queries and each key that a query looks at.
        """
        weights = self.layers * self.layer_weights + self.head_weights
        return 6 * weights + 12 * self.q_features * self.layers * self.mean_keys(seq)


def _shape(name: str, sizes: tuple[int, ...], published: float, **further: Any) -> ModelShape:
    hidden, ffn, layers, heads, kv_heads, vocab = sizes
    shape = ModelShape(
        name, hidden, ffn, layers, heads, kv_heads, hidden // heads, vocab, parameters_published=published
    )
    return replace(shape, **further)


_GPT = {"tied": True, "gated": False, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "norm_bias": True}

# (hidden, ffn, layers, heads, key and value heads, vocabulary) of the authors' own configurations
MODELS: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _shape("llama-2-7b", (4096, 11008, 32, 32, 32, 32000), 6.74e9),
        _shape("llama-2-13b", (5120, 13824, 40, 40, 40, 32000), 13.02e9),
        _shape("llama-2-70b", (8192, 28672, 80, 64, 8, 32000), 68.98e9),
        _shape("llama-3-8b", (4096, 14336, 32, 32, 8, 128256), 8.03e9),
        _shape("llama-3-70b", (8192, 28672, 80, 64, 8, 128256), 70.55e9),
        _shape("llama-3.1-405b", (16384, 53248, 126, 128, 8, 128256), 405.85e9),
        _shape("llama-3.2-1b", (2048, 8192, 16, 32, 8, 128256), 1.24e9, tied=True),
        _shape("llama-3.2-3b", (3072, 8192, 28, 24, 8, 128256), 3.21e9, tied=True),
        _shape("mistral-7b", (4096, 14336, 32, 32, 8, 32000), 7.24e9, window=4096, sliding=32),
        _shape("qwen2.5-7b", (3584, 18944, 28, 28, 4, 152064), 7.62e9, qkv_bias=True),
        _shape("qwen2.5-14b", (5120, 13824, 48, 40, 8, 152064), 14.77e9, qkv_bias=True),
        _shape("qwen2.5-32b", (5120, 27648, 64, 40, 8, 152064), 32.76e9, qkv_bias=True),
        _shape("qwen2.5-72b", (8192, 29568, 80, 64, 8, 152064), 72.71e9, qkv_bias=True),
        _shape("qwen3-8b", (4096, 12288, 36, 32, 8, 151936), 8.19e9, head_norms=True),
        _shape("qwen3-32b", (5120, 25600, 64, 64, 8, 151936), 32.76e9, head_dim=128, head_norms=True),
        _shape("gpt-3-175b", (12288, 49152, 96, 96, 96, 50257), 175e9, positions=2048, **_GPT),
        _shape("gpt2-xl", (1600, 6400, 48, 25, 25, 50257), 1.56e9, positions=1024, **_GPT),
    )
}
