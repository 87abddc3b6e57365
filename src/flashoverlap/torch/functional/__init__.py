"""Linear layers and MLPs whose communication is hidden, as differentiable functions of local shards."""

from .all_reduce import all_reduce_grad_linear, linear_all_reduce
from .column import all_gather_linear
from .mlp import mlp
from .row import linear_reduce_scatter

__all__ = ["all_gather_linear", "all_reduce_grad_linear", "linear_all_reduce", "linear_reduce_scatter", "mlp"]
