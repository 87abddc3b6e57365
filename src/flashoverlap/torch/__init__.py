"""The PyTorch side of FlashOverlap: ``import flashoverlap.torch as fo``."""

from ..overlap import Overlap
from ..report import Report
from .calibrate import calibrate, use_machine
from .call import REPORT
from .data_parallel import data_parallel
from .functional import (
    all_gather,
    all_gather_linear,
    all_reduce,
    all_reduce_grad_linear,
    all_to_all_linear,
    attention_all_to_all_linear,
    attention_reduce_scatter,
    linear_all_reduce,
    linear_all_to_all,
    linear_reduce_scatter,
    mlp,
    reduce_scatter,
    split,
    sum_gradient,
    vocab_parallel_cross_entropy,
)
from .modules import (
    CausalLM,
    ColumnParallel,
    FusedMLP,
    ParallelAttention,
    Replicated,
    RowParallel,
    SequenceParallel,
    ShardedInput,
    UlyssesAttention,
    VocabParallelEmbedding,
    VocabParallelHead,
    full_state_dict,
)
from .parallelize import parallelize
from .transport import PeerError


def report() -> Report:
    """What every call site of this process asked for, what it got and why; printable, ``report().clear()`` forgets."""
    return REPORT


__all__ = [
    "CausalLM",
    "ColumnParallel",
    "FusedMLP",
    "Overlap",
    "ParallelAttention",
    "PeerError",
    "Replicated",
    "RowParallel",
    "SequenceParallel",
    "ShardedInput",
    "UlyssesAttention",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "all_gather",
    "all_gather_linear",
    "all_reduce",
    "all_reduce_grad_linear",
    "all_to_all_linear",
    "attention_all_to_all_linear",
    "attention_reduce_scatter",
    "calibrate",
    "data_parallel",
    "full_state_dict",
    "linear_all_reduce",
    "linear_all_to_all",
    "linear_reduce_scatter",
    "mlp",
    "parallelize",
    "reduce_scatter",
    "report",
    "split",
    "sum_gradient",
    "use_machine",
    "vocab_parallel_cross_entropy",
]
