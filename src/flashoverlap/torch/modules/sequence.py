"""Which rows of a sequence a rank has: those of its up, and of these its share of tp.

S rows in all, dimension -2; ranks (u, t) of a mesh (up, tp); S_u are the rows of torch.tensor_split over up, and S_ut
those of torch.tensor_split of S_u over tp. With tensor parallelism alone there is no up, and S_u is S.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ..call import Call, eager
from ..check import digest, shape
from ..functional import all_gather, split, sum_gradient
from ..transport import refusing, transport_of
from .parallel import Parallel

_OP = "SequenceParallel"


def split_rows(x: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """The own rows ``[..., S_ut, K]`` of what all ranks hold alike; backward gathers the gradient of all rows."""
    own = x if parallel.up is None else split(x, **parallel.along(parallel.up))
    return split(own, **parallel.call)


def gather_rows(own: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """All rows ``[..., S, K]`` on every rank, for what all then compute alike."""
    rows = all_gather(own, **parallel.call)
    return rows if parallel.up is None else all_gather(rows, **parallel.along(parallel.up))


def summed_over_all(x: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """``x``, which all ranks hold alike and of which each uses a part; its gradient is the sum."""
    x = x if parallel.up is None else sum_gradient(x, **parallel.along(parallel.up))
    return sum_gradient(x, **parallel.call)


def of_own_up(x: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """What belongs to the rows ``S_u`` of something ``[..., S]`` that all ranks hold alike; it wants no gradient."""
    return x if parallel.up is None else x.tensor_split(parallel.up.size, -1)[parallel.up.rank]


@eager
def count_rows(own: torch.Tensor, parallel: Parallel) -> int:
    """S, from the own rows ``[..., S_ut, K]``, which must be those that belong to this rank."""
    with refusing_over_up(_OP, parallel, own):
        rows = _count(parallel.group, own.shape[-2], own, parallel)
    return rows if parallel.up is None else _count(parallel.up.group, rows, own, parallel)


@eager
def count_rows_of_up(own: torch.Tensor, parallel: Parallel) -> int:
    """S, from the rows ``[..., S_u, K]`` of the own up."""
    return own.shape[-2] if parallel.up is None else _count(parallel.up.group, own.shape[-2], own, parallel)


def _count(group: Any, rows: int, own: torch.Tensor, parallel: Parallel) -> int:
    call = Call(_OP, transport_of(group, _OP, own), parallel.overlap, own)
    return sum(call.agree_rows(f"features={own.shape[-1]}", f"rows {list(own.shape)}", rows))


@eager
def check_alike(
    op: str, what: str, x: torch.Tensor, parallel: Parallel, check: Callable[[], None] = lambda: None
) -> None:
    """Refuses, on every rank, an ``x`` that differs between ranks; ``what`` it is, and ``check`` may refuse more."""

    def agree(group: Any, said: str) -> None:
        call = Call(op, transport_of(group, op, x), parallel.overlap, torch.empty(0, device=x.device))
        call.agree("", said, said)

    with refusing_over_up(op, parallel, x):
        with refusing(transport_of(parallel.group, op, x)):
            check()
            said = f"{what} {shape(x)} with digest {digest(x):014x}; all ranks of the mesh take the same {what}"
        agree(parallel.group, said)
    if parallel.up is not None:
        agree(parallel.up.group, said)


def refusing_over_up(op: str, parallel: Parallel, like: torch.Tensor) -> Any:
    """Within, what goes wrong among the ranks of one up is told to the others, who would wait for them."""
    return nullcontext() if parallel.up is None else refusing(transport_of(parallel.up.group, op, like))
