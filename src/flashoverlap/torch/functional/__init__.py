"""Layers whose communication is hidden, and the exchanges between them, as differentiable functions of local shards."""

from .all_reduce import all_reduce_grad_linear, linear_all_reduce
from .attention import attention_reduce_scatter
from .column import all_gather_linear
from .cross_entropy import vocab_parallel_cross_entropy
from .exchange import all_gather, all_reduce, reduce_scatter, split, sum_gradient
from .mlp import mlp
from .row import linear_reduce_scatter
from .ulysses_attention import attention_all_to_all_linear
from .ulysses_column import linear_all_to_all
from .ulysses_row import all_to_all_linear

__all__ = [
    "all_gather",
    "all_gather_linear",
    "all_reduce",
    "all_reduce_grad_linear",
    "all_to_all_linear",
    "attention_all_to_all_linear",
    "attention_reduce_scatter",
    "linear_all_reduce",
    "linear_all_to_all",
    "linear_reduce_scatter",
    "mlp",
    "reduce_scatter",
    "split",
    "sum_gradient",
    "vocab_parallel_cross_entropy",
]
