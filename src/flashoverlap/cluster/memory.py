"""Bytes that a training step holds on one device.

What is counted, and nothing else: parameters and gradients in the dtype of training; AdamW's two moments in float32,
and a float32 copy of the parameters beside a half-precision dtype; what each layer keeps for its backward pass; logits;
and the largest buffers of gathered rows and gathered weights. A fused attention kernel keeps no scores.
"""

from __future__ import annotations

from dataclasses import dataclass

from .models import ModelShape
from .split import Split

SHARDS = ("none", "gradients", "parameters")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Memory:
    """Bytes by what they are for."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True)
class Training:
    """What one replica trains on.

    Args:
        seq: tokens of a sequence.
        batch: sequences of one replica at a time.
        dtype: of parameters, activations and gradients.
        shard: what is spread over all ranks that have the same weights, those of dp and up: "none", "gradients" (and
            the optimizer's state) or "parameters" (too).
        micro_batches: how often a step does that before gradients are exchanged.
        recompute: only the input of each layer is kept, and its forward pass runs again before its backward pass.
    """

    seq: int
    batch: int = 1
    dtype: str = "bfloat16"
    shard: str = "none"
    micro_batches: int = 1
    recompute: bool = False

    @property
    def tokens(self) -> int:
        """Of one micro-batch."""
        return self.seq * self.batch

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def optimizer_bytes(self) -> int:
        """Of one parameter."""
        return 8 if self.dtype == "float32" else 12


def local_layer_parameters(model: ModelShape, tp: int) -> float:
    """Elements of one layer on one tensor-parallel rank; key and value heads are never cut within a head."""
    kv = max(model.kv_features / tp, model.head_dim)
    matrices = model.layer_weights / tp + 2 * model.hidden * (kv - model.kv_features / tp)
    return matrices + (model.layer_parameters - model.layer_weights)


def memory_of(model: ModelShape, split: Split, work: Training) -> Memory:
    """What one device holds at the peak of a step."""
    layer = local_layer_parameters(model, split.tp)
    own = model.layers * layer + model.embedding_parameters / split.tp + model.hidden
    spread = {shard: split.copies if SHARDS.index(work.shard) >= SHARDS.index(shard) else 1 for shard in SHARDS[1:]}
    rows, itemsize = work.tokens / split.up, work.itemsize
    gathered_rows = 2 * rows * model.hidden * itemsize if split.tp > 1 else 0
    gathered_weights = 2 * layer * itemsize if spread["parameters"] > 1 else 0
    return Memory(
        own * itemsize / spread["parameters"],
        own * itemsize / spread["gradients"],
        own * work.optimizer_bytes / spread["gradients"],
        _activations(model, split, work),
        gathered_rows + gathered_weights,
    )


def _activations(model: ModelShape, split: Split, work: Training) -> float:
    """Both residual inputs and normalized inputs; q, k, v and the attention's output; what the MLP keeps; logits with
    their gradient in float32. All are cut by ``up * tp``, rows or features."""
    tokens = work.tokens / (split.up * split.tp)
    kv = max(model.kv_features, model.head_dim * split.tp)
    inner = 2 * model.q_features + 2 * kv + model.ffn * (3 if model.gated else 2)
    layer = tokens * (4 * model.hidden + inner) * work.itemsize
    logits = tokens * model.vocab * (work.itemsize + 4)
    if not work.recompute:
        return model.layers * layer + logits
    return model.layers * tokens * model.hidden * work.itemsize + max(layer, logits)
