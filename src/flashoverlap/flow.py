"""What an operator computes, said once and without any order: the statement that schedules are built from and held to.

Rank ``q`` applies its own kernels ``f_q`` (its weight shards) to every piece ``j``. Where the input is *gathered*, piece
``j`` lies on rank ``j`` at first; where the output is *reduced*, piece ``j`` of it is the sum over all ranks ``q``.

    all_gather_matmul        y_j = mm_r(x_j)                        for every piece j, on every rank r
    matmul_reduce_scatter    z_r = sum_q mm_q(h_r)                  on rank r
    all_reduce               z_j = sum_q mm_q(h_j)                  for every piece j, on every rank
    grad_reduce_scatter      z_r = sum_q wgrad_q(h_r)               on rank r: piece j of a gradient belongs to rank j
    param_all_gather         y_j = mm_r(x_j)                        on every rank: piece j of a weight comes from rank j
    mlp                      z_r = sum_q down_q(up_q(x_r))          on rank r
    *_backward               the same with weight gradients beside: w = wgrad_r(all pieces), never summed over ranks

In an all-to-all, block ``s_t`` goes from rank ``s`` to rank ``t``, behind kernels of ``s``, before kernels of ``t``:

    all_to_all                       p_s_t = mm_s(a_s_t)                     on rank t, for every s
    all_to_all_matmul                z_t = sum_s mm_t(p_s_t)                 on rank t
    attention_all_to_all             z_t = sum_s mm_t(attend_s(a_s_t))       on rank t
    all_to_all_backward              z_t as above, beside w = sum_s wgrad_t(p_s_t)
    all_to_all_matmul_backward       p_s_t as above, beside a local w = wgrad_t()
    attention_all_to_all_backward    y_s_t = attend_backward_t(mm_s(a_s_t))  on rank t, beside a local w = wgrad_t()

An operator that multiplies on one side only, or not at all (``all_gather``, ``heads_to_rows``, the attention of Ulysses
without a projection), runs the flow with a kernel that puts rows and features where they belong in place of a ``mm``.

Several tensors that move side by side (q, k, v) have blocks of their own: ``p1_2``, ``pb1_2``, ``pc1_2``, and weight
gradients ``w``, ``wb``, ``wc``; sums ``z`` go over all of them.
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

    An empty ``reads`` means that all it needs is local. In an all-to-all it is a sum over the blocks that come.
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
        reduce: "" (every rank keeps what it computes), "reduce_scatter" or "all_reduce"; in an all-to-all "blocks" (a
            rank sums those that come to it); sums are called ``z``.
        extra: letter of further pieces that are gathered for a weight gradient alone.
        wgrads: weight gradients, in the order in which their inputs arrive.
        swap: in an all-to-all, how many of the kernels run before the blocks change hands; None elsewhere.
        deferred: nothing waits before all kernels have run, so that a run may be left open there and finished later.
    """

    op: str
    kernels: tuple[str, ...]
    letters: tuple[str, ...]
    gather: bool = False
    reduce: str = ""
    extra: str = ""
    wgrads: tuple[Wgrad, ...] = ()
    swap: int | None = None
    deferred: bool = False

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
            swap=None if self.swap is None or self.swap > keep else self.swap,
            deferred=self.deferred and keep > 0,
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
        # data parallel: a gradient that every rank has a term of, and a weight that every rank has a piece of
        Flow("grad_reduce_scatter", ("wgrad",), ("h", "p"), reduce="reduce_scatter", deferred=True),
        Flow("param_all_gather", ("mm",), ("x", "y"), gather=True),
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

ALL_TO_ALLS = {
    flow.op: flow
    for flow in (
        Flow("all_to_all", ("mm",), ("a", "p"), swap=1),
        Flow("all_to_all_matmul", ("mm",), ("p", "z"), reduce="blocks", swap=0),
        Flow("attention_all_to_all", ("attend", "mm"), ("a", "p", "z"), reduce="blocks", swap=1),
        # backward of all_to_all: the gradients that come feed dgrad (z) and wgrad of the own rows
        Flow("all_to_all_backward", ("mm",), ("p", "z"), reduce="blocks", wgrads=(Wgrad("wgrad", "w", "p"),), swap=0),
        # backward of all_to_all_matmul: dgrad by block (p); what wgrad needs came in forward
        Flow("all_to_all_matmul_backward", ("mm",), ("a", "p"), wgrads=(Wgrad("wgrad", "w"),), swap=1),
        Flow(
            "attention_all_to_all_backward",
            ("mm", "attend_backward"),
            ("a", "p", "y"),
            wgrads=(Wgrad("wgrad", "w"),),
            swap=1,
        ),
    )
}


def of_tensor(letter: str, tensor: int) -> str:
    """The letter of one of several tensors that move side by side: p, pb, pc."""
    return letter if tensor == 0 else letter + "abcdefghijklmnopqrstuvwxyz"[tensor]


@lru_cache(maxsize=256)
def flow_of(op: str) -> Flow:
    """The flow named ``op``, with outputs left out as its ``-letter`` suffixes say; ValueError for an unknown name."""
    base, *dropped = op.split("-")
    flow = FLOWS.get(base) or ALL_TO_ALLS.get(base)
    if flow is None:
        raise ValueError(f"unknown operator {base!r}; known: {', '.join((*FLOWS, *ALL_TO_ALLS))}")
    output = flow.output
    # weight gradients first: what the per-piece result leaves to be computed depends on those that are wanted
    for letter in sorted(dropped, key=lambda letter: letter == output):
        flow = flow.without(letter)
    return replace(flow, op=op)
