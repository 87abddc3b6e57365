"""One call of an operator: agreed between the ranks, run, and entered in the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from ..choice import Choice, choose
from ..overlap import Overlap
from ..patterns import build, split_sizes
from ..report import Record, Report, call_site, place
from .errors import naming
from .execute import Kernel, execute
from .layout import Layout, layout
from .pieces import Scattered
from .staging import Lease
from .transport import agree

F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """Keeps torch.compile out of an operator: its graph breaks there. Type checkers keep the signature."""
    return cast(F, torch.compiler.disable(function))


# What fo.report() shows; the records of a process are one table by nature.
REPORT = Report()


class Call:
    """An operator's call on one group, forward and backward.

    Args:
        op: the operator's public name.
        transport: of the group.
        overlap: what the caller asked for.
        like: a tensor of the call, for device and dtype.
    """

    def __init__(self, op: str, transport: Any, overlap: Overlap, like: torch.Tensor) -> None:
        self.op, self.transport, self.overlap = op, transport, overlap
        self.rank: int = transport.rank
        self.world_size: int = transport.world_size
        self.dtype, self.device = like.dtype, like.device
        self.site, self.place = call_site(), place()
        self.accumulate = torch.promote_types(like.dtype, getattr(torch, overlap.accumulate_dtype))
        self.differentiable = torch.is_grad_enabled()  # within a Function, needs_input_grad does not tell
        self._number = 0  # of the forward among all agreements of the group: what tells two equal calls apart
        self._agreed = 0  # number of the agreement that the next run goes by

    def agree(self, phase: str, shared: str, shown: str, rows: int = 0) -> list[int]:
        """Makes sure that all ranks make the same call (:func:`~flashoverlap.torch.transport.agree`).

        ``phase`` is "" for the forward; what comes later must belong to the same forward on every rank.
        """
        if self.world_size == 1:
            return [rows]
        name = f"{self.op} {phase}".strip()
        settings = f"{self.dtype} {self.overlap}" + (f" in {self.place}" if self.place else "")
        settings += f" of call {self._number}" if phase else ""
        with self.entered():
            said = agree(self.transport, f"{name} {settings} {shared}", f"{name}({shown}, {settings})", rows)
            self._agreed = self.transport.calls
        self._number = self._number if phase else self._agreed
        return said

    def agree_rows(self, shared: str, shown: str, rows: int) -> tuple[int, ...]:
        """The same for a shard of ``rows`` rows: returns every rank's, which must be those of torch.tensor_split."""
        owned = self.agree("", shared, shown, rows)
        wanted = split_sizes(sum(owned), self.world_size)
        if owned != wanted:
            raise ValueError(
                f"{self.op}: the ranks hold {owned} rows, {sum(owned)} in all; torch.tensor_split gives the "
                f"{self.world_size} ranks {wanted}, and every rank must hold its own; nothing was sent"
            )
        return tuple(owned)

    def choose(self, flow: str, rows: Sequence[int]) -> Choice:
        """Mode, pattern and splits for pieces of these rows; RuntimeError where strict forbids them."""
        choice = choose(self.overlap, flow, rows)
        if self.overlap.strict and self.overlap.mode not in ("auto", choice.mode):
            raise RuntimeError(
                f"{self.op}: mode {self.overlap.mode!r} was asked for, strictly, and {choice.mode!r} would be taken: "
                f"{choice.reason}; nothing was sent"
            )
        return choice

    def layout(self, choice: Choice, outer: int, owned: tuple[int, ...], inner: int) -> Layout:
        """The layout of a sharded tensor under a choice."""
        return layout(outer, owned, inner, choice.splits)

    def travels(self, choice: Choice) -> torch.dtype:
        """Dtype in which partials are sent: where what is sent is a sum already, that of the accumulation."""
        return self.accumulate if choice.pattern in ("ring", "collective") else self.dtype

    def scattered(
        self, rows: Layout, choice: Choice, out: torch.Tensor, lease: Lease, bias: torch.Tensor | None = None
    ) -> Scattered:
        """The partial sums of a run whose own rows end in ``out``."""
        travels = self.travels(choice)
        return Scattered(rows, self.rank, out, lease, bias=bias, accumulate=self.accumulate, travels=travels)

    @contextmanager
    def leased(self) -> Iterator[Lease]:
        """Staging for one run; not given back where the run fails ([Note: staging lifetime])."""
        lease = Lease(self.transport.staging, self.device)
        yield lease
        lease.close()

    def run(
        self,
        flow: str,
        choice: Choice,
        rows: Sequence[int],
        widths: Mapping[str, int],
        buffers: Callable[[str], torch.Tensor],
        kernels: Mapping[str, Kernel],
        phase: str = "",
    ) -> None:
        """Runs the schedule of ``flow`` and adds what it cost to the report.

        Args:
            flow: name of the flow (:mod:`flashoverlap.flow`).
            rows: rows of each rank's piece.
            widths: bytes of a row by letter of the piece.
            buffers: gives the tensor of each name that is exchanged.
            kernels: what runs each kernel.
            phase: "" or "backward".
        """
        schedule = build(flow, rows, pattern=choice.pattern, splits=choice.splits, row_bytes=widths)
        with self.entered():
            if self.transport.calls != self._agreed and self.world_size > 1:
                raise self._crowded()
            outcome = execute(schedule, self.transport, buffers, kernels, self.transport.spans)
        name = f"{self.op} {phase}".strip()
        REPORT.add(
            Record(
                self.site,
                name,
                self.overlap.mode,
                choice.mode,
                choice.code,
                choice.reason,
                choice.detail,
                1,
                outcome.sent_bytes,
                outcome.blocked_s,
            )
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Keeps a second thread, or a kernel that calls an operator itself, off the group's channels."""
        if not self.transport.busy.acquire(blocking=False):
            raise self._crowded()
        try:
            with naming(self.op):
                yield
        finally:
            self.transport.busy.release()

    def _crowded(self) -> RuntimeError:
        """The error of two operators at once; their order between the ranks is lost, so the transport is given up."""
        error = RuntimeError(
            f"{self.op}: another operator is running on this group at the moment; operators on one group must be "
            "called one after another, in the same order on every rank; give a second thread a group of its own"
        )
        self.transport.fail(error)
        return error
