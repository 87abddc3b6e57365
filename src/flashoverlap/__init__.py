"""FlashOverlap: hide the communication of distributed training and inference behind its computation, and prove it.

Here is the description of a decomposed collective, and what can be told of it without a tensor; ``import
flashoverlap.torch as fo`` has the operators. Nothing here loads torch.
"""

from .all_to_all import all_to_all
from .machine import Kernel, Link, Machine
from .matmul import Matmul
from .overlap import Overlap
from .patterns import all_gather_matmul, all_reduce, build, matmul_reduce_scatter, mlp
from .plan import Plan, plan
from .schedule import Collective, Compute, Exchange, Schedule, ScheduleError
from .simulate import simulate
from .trace import Trace
from .verify import verify

__version__ = "0.1.0"

__all__ = [
    "Collective",
    "Compute",
    "Exchange",
    "Kernel",
    "Link",
    "Machine",
    "Matmul",
    "Overlap",
    "Plan",
    "Schedule",
    "ScheduleError",
    "Trace",
    "__version__",
    "all_gather_matmul",
    "all_reduce",
    "all_to_all",
    "build",
    "matmul_reduce_scatter",
    "mlp",
    "plan",
    "simulate",
    "verify",
]
