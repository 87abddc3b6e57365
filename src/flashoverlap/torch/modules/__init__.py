"""Parallel modules: what a plan makes of a model's own modules, a style a kind.

axes         the dimensions of a mesh, and what they are for
parallel     what all modules of a parallelized model share; local tensors of DTensor parameters
sequence     which rows of a sequence a rank has; heads: which heads of an attention
style        what a style is: where its parameters go, and what its modules do from then on
lazy         tensors whose values are elsewhere; lazy_rows: all rows, of which only the own ones are here;
             lazy_attention: attention that is put off until its output projection
random       random numbers that differ between ranks, or are equal, whatever the seeds
linear       ColumnParallel, RowParallel
attention    ParallelAttention; head_exchange: its heads sharded where outside the sequence is (Ulysses)
mlp          FusedMLP
rows         SequenceParallel, Replicated, ShardedInput
vocabulary   VocabParallelEmbedding, VocabParallelHead
ulysses      UlyssesAttention, a module by itself: the sequence sharded outside, heads inside
causal_lm    CausalLM: the whole language model and its loss; logits: what it gives beside
"""

from .attention import ParallelAttention
from .causal_lm import CausalLM
from .linear import ColumnParallel, RowParallel
from .mlp import FusedMLP
from .parallel import full_state_dict
from .rows import Replicated, SequenceParallel, ShardedInput
from .style import Style
from .ulysses import UlyssesAttention
from .vocabulary import VocabParallelEmbedding, VocabParallelHead

__all__ = [
    "CausalLM",
    "ColumnParallel",
    "FusedMLP",
    "ParallelAttention",
    "Replicated",
    "RowParallel",
    "SequenceParallel",
    "ShardedInput",
    "Style",
    "UlyssesAttention",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "full_state_dict",
]
