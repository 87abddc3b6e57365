"""What an operator computes, said once and without any order: the statement that schedules are built from and held to.

Rank ``q`` applies its own kernels ``f_q`` (its weight shards) to every piece ``j``. Where the input is *gathered*, piece
``j`` lies on rank ``j`` at first; where the output is *reduced*, piece ``j`` of it is the sum over all ranks ``q``.

    all_gather_matmul        y_j = mm_r(x_j)                        for every piece j, on every rank r
    matmul_reduce_scatter    z_r = sum_q mm_q(h_r)                  on rank r
    all_reduce               z_j = sum_q mm_q(h_j)                  for every piece j, on every rank
    mlp                      z_r = sum_q down_q(up_q(x_r))          on rank r
    *_backward               the same with weight gradients beside: w = wgrad_r(all pieces), never summed over ranks

``all_to_all`` stands apart: block ``s_d`` is made by rank ``s`` for rank ``d`` and nothing is summed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

PIECE = re.compile(r"([a-z]+)(\d+)(?:\.(\d+))?$")
BLOCK = re.compile(r"([a-z]+)(\d+)_(\d+)(?:\.(\d+))?$")


@dataclass(frozen=True)
class Wgrad:
    """A weight gradient: ``write = kernel(all pieces of letter reads)``, possible once ``after`` kernels have run.

    An empty ``reads`` means that all it needs is local.
    """

    kernel: str
    write: str
    reads: str = ""
    after: int = 0


@dataclass(frozen=True)
class Flow:
    """The mathematics of one operator.

    Args:
        op: its name, with ``-letter`` for every output left out (``mlp_backward-z`` computes no input gradient).
        kernels: applied to each piece in turn.
        letters: names of the pieces before the first kernel and after each.
        gather: pieces ``letters[0]`` are spread over the ranks at first.
        reduce: "" (every rank keeps what it computes), "reduce_scatter" or "all_reduce"; sums are called ``z``.
        extra: letter of further pieces that are gathered for a weight gradient alone.
        wgrads: weight gradients, in the order in which their inputs arrive.
    """

    op: str
    kernels: tuple[str, ...]
    letters: tuple[str, ...]
    gather: bool = False
    reduce: str = ""
    extra: str = ""
    wgrads: tuple[Wgrad, ...] = ()

    @property
    def output(self) -> str:
        """Letter of the per-piece result ("" where there is none)."""
        return "z" if self.reduce else self.letters[-1] if self.kernels else ""

    def without(self, letter: str) -> Flow:
        """The same operator with output ``letter`` left out, and all that only it needed."""
        wgrads = tuple(w for w in self.wgrads if w.write != letter)
        dropped = letter == self.output
        if not dropped and len(wgrads) == len(self.wgrads):
            raise ValueError(f"{self.op} has no output {letter!r}; it has {self.outputs()}")
        keep = max((w.after for w in wgrads), default=0) if dropped or not self.output else len(self.kernels)
        extra = self.extra if any(w.reads == self.extra for w in wgrads) else ""
        gather = self.gather and (keep > 0 or any(w.reads == self.letters[0] for w in wgrads))
        return replace(
            self,
            op=f"{self.op}-{letter}",
            kernels=self.kernels[:keep],
            letters=self.letters[: keep + 1],
            gather=gather,
            reduce="" if dropped else self.reduce,
            extra=extra,
            wgrads=wgrads,
        )

    def outputs(self) -> tuple[str, ...]:
        """Letters of everything that a rank ends with."""
        return tuple(letter for letter in (self.output, *(w.write for w in self.wgrads)) if letter)


FLOWS = {
    flow.op: flow
    for flow in (
        Flow("all_gather_matmul", ("mm",), ("x", "y"), gather=True),
        Flow("matmul_reduce_scatter", ("mm",), ("h", "p"), reduce="reduce_scatter"),
        Flow("all_reduce", ("mm",), ("h", "p"), reduce="all_reduce"),
        Flow("mlp", ("up", "down"), ("x", "h", "p"), gather=True, reduce="reduce_scatter"),
        # backward of a row-parallel layer: one gather of dz feeds dgrad (y) and wgrad (w)
        Flow("row_backward", ("mm",), ("x", "y"), gather=True, wgrads=(Wgrad("wgrad", "w", "x"),)),
        # backward of a column-parallel layer: dgrad is scattered while x is gathered (g) for wgrad
        Flow(
            "column_backward",
            ("mm",),
            ("h", "p"),
            reduce="reduce_scatter",
            extra="g",
            wgrads=(Wgrad("wgrad", "w", "g"),),
        ),
        # the same where the gathered x was kept in forward, or is replicated
        Flow("column_backward_saved", ("mm",), ("h", "p"), reduce="reduce_scatter", wgrads=(Wgrad("wgrad", "w"),)),
        Flow("all_reduce_backward", ("mm",), ("h", "p"), reduce="all_reduce", wgrads=(Wgrad("wgrad", "w"),)),
        # backward of the whole MLP: dz gathered (x), through both dgrads, dx scattered; both wgrads at the end
        Flow(
            "mlp_backward",
            ("down", "up"),
            ("x", "h", "p"),
            gather=True,
            reduce="reduce_scatter",
            extra="g",
            wgrads=(Wgrad("wgrad_down", "v", "x"), Wgrad("wgrad_up", "w", "g", after=1)),
        ),
    )
}


@lru_cache(maxsize=256)
def flow_of(op: str) -> Flow:
    """The flow named ``op``, with outputs left out as its ``-letter`` suffixes say; ValueError for an unknown name."""
    base, *dropped = op.split("-")
    if base not in FLOWS:
        raise ValueError(f"unknown operator {base!r}; known: {', '.join(FLOWS)}")
    flow = FLOWS[base]
    # weight gradients first: what the per-piece result leaves to be computed depends on those that are wanted
    for letter in sorted(dropped, key=lambda letter: letter == flow.output):
        flow = flow.without(letter)
    return replace(flow, op=op)
