"""The PyTorch side of FlashOverlap: ``import flashoverlap.torch as fo``."""

from ..overlap import Overlap
from ..report import Report
from .call import REPORT
from .functional import all_gather_linear, all_reduce_grad_linear, linear_all_reduce, linear_reduce_scatter, mlp
from .transport import PeerError


def report() -> Report:
    """What every call site of this process asked for, what it got and why; printable, ``report().clear()`` forgets."""
    return REPORT


__all__ = [
    "Overlap",
    "PeerError",
    "all_gather_linear",
    "all_reduce_grad_linear",
    "linear_all_reduce",
    "linear_reduce_scatter",
    "mlp",
    "report",
]
