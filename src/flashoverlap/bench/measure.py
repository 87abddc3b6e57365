"""The one loop that measures: values first, then all candidates in turn, round by round."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

import flashoverlap.torch as fo

from ..live_bytes import LiveBytes
from ..report import Record
from ..torch.staging import Staging
from ..torch.transport import transport_of
from ..trace import Span
from ..uncollected import uncollected
from .candidates import Candidate
from .case import Case, case_of
from .contestant import Contestant, silent
from .options import Options
from .predicted import agreement, said
from .summary import Part
from .values import TOLERANCES, compare

_WARM_UP_ROUNDS = 1  # beside the run whose values are checked
_TAIL_ROUNDS = 3


class Bench:
    """One rank of a benchmark.

    Args:
        options: what to run.
        candidates: in the order of the result.
        group: the process group that the candidates use.
        barrier: brings all ranks to one point, by a channel that no candidate uses.

    Attributes:
        parts: what this rank has measured, in the order of the candidates.
        agreement_s: seconds of a message by which ranks agree on a call.
    """

    agreement_s = 0.0

    def __init__(
        self, options: Options, candidates: Sequence[Candidate], group: Any, barrier: Callable[[], object]
    ) -> None:
        self._options, self._candidates, self._group, self._barrier = options, candidates, group, barrier
        dtype = getattr(torch, options.dtype)
        self._case = case_of(options.shape, dtype, group.rank(), group.size())
        self._grad = self._case.grad if options.train else None
        self._reference = self._case.reference(options.train)
        self._contestants = [_contestant(each, self._case, group) for each in candidates]
        self.parts = [
            Part(each.row, detail=made.detail, note=each.note)
            for each, made in zip(candidates, self._contestants, strict=True)
        ]

    def run(self) -> list[Part]:
        """Checks all values, measures all candidates, and checks once more what they give."""
        self._check_reduced()
        self._round(self._checked, 0)
        for number in range(_WARM_UP_ROUNDS):
            self._round(self._timed, number)
        for part in self.parts:
            part.begin()
        for number in range(self._options.repeats):
            self.before_round(number)
            self._round(self._timed, number)
        for number in range(_TAIL_ROUNDS):
            self._round(self._tailed, number)
        self._round(self._weighed, 0)
        self._round(self._checked, 0)
        return self.parts

    def before_round(self, number: int) -> None:
        """Before a round by the clock; the first finds out what it costs to agree, if there are plans to add it to."""
        if number == 0 and transport_of(self._group).machine is not None:
            self.agreement_s = agreement(self._group, self._barrier)

    def traces(self) -> dict[int, list[Span]]:
        """The spans of one further run of each candidate of mode flash, by its place among the candidates."""
        found: dict[int, list[Span]] = {}
        for index, candidate in enumerate(self._candidates):
            if candidate.row == "flash":
                runner, spans = self._contestants[index], found.setdefault(index, [])
                runner.clear()
                self._barrier()
                runner.prepare()
                for transport in runner.transports(self._group):
                    transport.spans = spans
                runner.run(self._grad)
                for transport in runner.transports(self._group):
                    transport.spans = None
        return found

    def _round(self, visit: Callable[[int], None], first: int) -> None:
        """Visits every candidate once, each after a barrier, beginning with another one in each round."""
        count = len(self._candidates)
        gc.collect()
        with uncollected():  # a collection would fall into some candidate's time
            for place in range(count):
                index = (first + place) % count
                self._contestants[index].clear()
                self._barrier()
                visit(index)

    def _timed(self, index: int) -> None:
        """Runs a candidate by the clock; what several passes took is shared out among them."""
        part, runner, passes = self.parts[index], self._contestants[index], self._case.passes
        runner.prepare()
        transports = runner.transports(self._group)
        fo.report().clear()
        agreed = sum(transport.calls for transport in transports)
        other_s, start_s = time.process_time() - time.thread_time(), time.perf_counter()
        out = runner.run(self._grad)
        end_s = time.perf_counter()
        part.seconds.append((end_s - start_s) / passes)
        part.other_cpu_s.append((time.process_time() - time.thread_time() - other_s) / passes)
        del out
        records = fo.report().records
        if records and not runner.detail:
            part.detail = ", ".join(dict.fromkeys(filter(None, map(_taken, records))))
        blocked_s = sum(record.blocked_s for record in records) if records else runner.blocked_s()
        if blocked_s is not None:
            part.blocked_s.append(blocked_s / passes)
        agreed = sum(transport.calls for transport in transports) - agreed
        alike = not self._candidates[index].variant  # else other things are outside of its calls than of compute's
        predicted_s, in_calls_s = said(records if alike else (), passes, agreed, self.agreement_s)
        part.predicted_s.append(predicted_s)
        part.in_calls_s.append(in_calls_s)
        counted = sum(record.bytes for record in records) // passes if records else None
        part.sent_bytes = self._sent_bytes(index, counted)

    def _sent_bytes(self, index: int, counted: int | None) -> int | None:
        """What was sent; the report does not know what a backend's own collective sends, nor what others do."""
        candidate = self._candidates[index]
        if candidate.silent or self._group.size() == 1:
            return 0
        collective = candidate.overlap is not None and candidate.overlap.mode == "collective"
        return None if collective else counted

    def _tailed(self, index: int) -> None:
        """Takes the tails of a candidate that has some."""
        tails = self._contestants[index].tails()
        if tails is not None:
            self.parts[index].first_matmul_s.append(tails.first_matmul_s)
            self.parts[index].gradients_ready_s.append(tails.gradients_ready_s)

    def _weighed(self, index: int) -> None:
        """Takes the peak memory of a candidate, with buffers of its own where others share the group's."""
        runner = self._contestants[index]
        if self._candidates[index].silent:
            return
        transports = runner.transports(self._group)
        kept = [transport.staging for transport in transports]
        try:
            for transport in transports:
                transport.staging = Staging()
            with LiveBytes(runner.held()) as live:
                runner.run(self._grad)
        finally:
            for transport, staging in zip(transports, kept, strict=True):
                transport.staging = staging
        self.parts[index].peak_bytes = live.peak

    def _checked(self, index: int) -> None:
        """Runs a candidate at the measured size and compares what it gives."""
        runner = self._contestants[index]
        out = runner.run(self._grad)
        if not self._candidates[index].silent:
            self._enter(index, runner.results(out), self._case, self._reference)
        runner.clear()

    def _enter(self, index: int, found: Any, case: Case, reference: Any, of: str = "") -> None:
        """Enters an error into the candidate's part; the errors of reduced sizes only where they are wrong."""
        error, complaint = compare(found, reference, TOLERANCES[case.dtype], case.units)
        part = self.parts[index]
        if not of:
            part.max_abs_error = max(error, part.max_abs_error or 0.0) if math.isfinite(error) else error
        if complaint and not part.complaint:
            part.complaint = of + complaint

    def _check_reduced(self) -> None:
        """Values, and in training all gradients, in float64 at a small size with uneven parts; peers take no such."""
        shape = self._options.shape.reduced(self._group.size())
        case = case_of(shape, torch.float64, self._group.rank(), self._group.size())
        reference = case.reference(self._options.train)
        for index, candidate in enumerate(self._candidates):
            if candidate.overlap is not None and not candidate.silent:
                runner = _contestant(candidate, case, self._group)
                runner.clear()
                out = runner.run(case.grad if self._options.train else None)
                self._enter(index, runner.results(out), case, reference, f"at {shape} in float64: ")


def _taken(record: Record) -> str:
    """What a call site ran, with its mode where that was left open."""
    return record.taken if record.mode_asked == "auto" else record.detail


def _contestant(candidate: Candidate, case: Case, group: Any) -> Contestant:
    """What a candidate stands for, on this rank."""
    variant = {"variant": candidate.variant} if candidate.variant else {}
    if candidate.overlap is None:
        peer = import_module(f"flashoverlap.bench.peers.{candidate.row}")  # late: a peer may not be installed
        return peer.CONTESTANTS[case.shape.case](case, group, **variant)
    transport = silent(case.rank, case.world_size, case.dtype) if candidate.silent else group
    return case.contestant(group, transport, candidate.overlap, **variant)
