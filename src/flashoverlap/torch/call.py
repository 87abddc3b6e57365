"""One call of an operator: agreed between the ranks, run, and entered in the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from ..choice import FEWEST_ROWS, Choice, call_bytes, choose
from ..overlap import DTYPES, Overlap
from ..patterns import build, split_sizes
from ..report import Record, Report, call_site, place
from ..schedule import Schedule
from .calibrate import at_first_use, failing_together
from .errors import naming
from .execute import Kernel, execute
from .layout import Layout, layout
from .look import look
from .pieces import Scattered
from .staging import Lease
from .transport import agree_twice

F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """Keeps torch.compile out of an operator: its graph breaks there. Type checkers keep the signature."""
    return cast(F, torch.compiler.disable(function))


_LOOK = 1 << 62  # beside the features of a shard, that a rank wants to look at the wire

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
        self.shard = 0  # the most features that any rank has a shard of, told in forward: what plans go by
        self._number = 0  # of the forward among all agreements of the group: what tells two equal calls apart
        self._agreed = 0  # number of the agreement that the next run goes by

    def agree(self, phase: str, shared: str, shown: str, rows: int = 0, shard: int = 0) -> list[int]:
        """Makes sure that all ranks make the same call (:func:`~flashoverlap.torch.transport.agree`).

        ``phase`` is "" for the forward; what comes later must belong to the same forward on every rank. ``rows`` and
        ``shard``, the features of a shard, are this rank's own: returns every rank's rows, and keeps the widest shard.
        """
        self.shard = self.shard if phase else shard
        if self.world_size == 1:
            return [rows]
        name = f"{self.op} {phase}".strip()
        settings = f"{self.dtype} {self.overlap}" + (f" in {self.place}" if self.place else "")
        settings += f" of call {self._number}" if phase else ""
        settings += f" planned for {self.transport.machine_name}" if self.transport.machine_name else ""
        with self.entered():
            more = shard | (_LOOK if self._wants_look() else 0)
            said = agree_twice(
                self.transport, f"{name} {settings} {shared}", f"{name}({shown}, {settings})", rows, more
            )
            if any(each & _LOOK for _, each in said):
                self._look()
            self._agreed = self.transport.calls
        self.shard = self.shard if phase else max(each & ~_LOOK for _, each in said)
        self._number = self._number if phase else self._agreed
        return [count for count, _ in said]

    def agree_rows(self, shared: str, shown: str, rows: int, shard: int = 0) -> tuple[int, ...]:
        """The same for a shard of ``rows`` rows: returns every rank's, which must be those of torch.tensor_split."""
        owned = self.agree("", shared, shown, rows, shard)
        wanted = split_sizes(sum(owned), self.world_size)
        if owned != wanted:
            raise ValueError(
                f"{self.op}: the ranks hold {owned} rows, {sum(owned)} in all; torch.tensor_split gives the "
                f"{self.world_size} ranks {wanted}, and every rank must hold its own; nothing was sent"
            )
        return tuple(owned)

    def choose(
        self,
        flow: str,
        outer: int,
        owned: tuple[int, ...],
        inner: int,
        sizes: Mapping[str, int | Sequence[int]] | None = None,
        fewest_rows: int = FEWEST_ROWS,
    ) -> tuple[Choice, Layout]:
        """Mode, pattern and splits for a sharded tensor, and its layout under them; RuntimeError where strict forbids.

        ``outer``, ``owned`` and ``inner`` are those of :class:`~flashoverlap.torch.layout.Layout`. With the other
        ``sizes`` of the call (:mod:`flashoverlap.workload`) it is planned, if the machine is known; else the rule of
        thumb leaves each split ``fewest_rows``.
        """
        rows = [outer * part * inner for part in owned]
        dtype = str(self.dtype).removeprefix("torch.")
        if self.overlap.mode == "auto" and sizes is not None and dtype in DTYPES:
            self._measure_once(call_bytes(sum(rows), sizes, dtype))
        machine = self.transport.machine
        choice = choose(self.overlap, flow, rows, machine=machine, sizes=sizes, dtype=dtype, fewest_rows=fewest_rows)
        if self.overlap.strict and self.overlap.mode not in ("auto", choice.mode):
            raise RuntimeError(
                f"{self.op}: mode {self.overlap.mode!r} was asked for, strictly, and {choice.mode!r} would be taken: "
                f"{choice.reason}; nothing was sent"
            )
        return choice, layout(outer, owned, inner, choice.splits)

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
        """Builds the schedule of ``flow`` and runs it.

        Args:
            flow: name of the flow (:mod:`flashoverlap.flow`).
            rows: rows of each rank's piece.
            widths: bytes of a row by letter of the piece.
            buffers: gives the tensor of each name that is exchanged.
            kernels: what runs each kernel.
            phase: "" or "backward".
        """
        schedule = build(flow, rows, pattern=choice.pattern, splits=choice.splits, row_bytes=widths, nodes=choice.nodes)
        self.run_schedule(schedule, choice, buffers, kernels, phase)

    def run_schedule(
        self,
        schedule: Schedule,
        choice: Choice,
        buffers: Callable[[str], torch.Tensor],
        kernels: Mapping[str, Kernel],
        phase: str = "",
    ) -> None:
        """Runs a schedule and adds what it cost to the report; the arguments are those of :meth:`run`."""
        with self.entered():
            if self.transport.calls != self._agreed and self.world_size > 1:
                raise self._crowded()
            start_s = time.perf_counter()
            outcome = execute(schedule, self.transport, buffers, kernels, self.transport.spans)
            seconds = time.perf_counter() - start_s
        name = f"{self.op} {phase}".strip()
        if self.overlap.mode == "auto" and self.transport.drift is not None:
            self.transport.drift.enter((name, choice.detail, outcome.sent_bytes), seconds)
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
                seconds,
                choice.predicted_s,
                choice.predicted_exposed_s,
            )
        )

    def _measure_once(self, nbytes: int) -> None:
        """Measures the machine, where that has not been done and the call has bytes enough to be worth it."""
        if at_first_use(self.transport, self.dtype, self.device, nbytes, REPORT.note):
            self._agreed = self.transport.calls

    def _wants_look(self) -> bool:
        drift = self.transport.drift
        return self.overlap.mode == "auto" and drift is not None and drift.wants_look

    def _look(self) -> None:
        """Looks at the wire with all other ranks, as one of them wishes; plans go by what is found."""
        with failing_together(self.transport):
            found = look(self.transport, self.device)
        if found:
            REPORT.note(f"{self.op}, {self.site}: {found}; planned anew from this call on")

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
