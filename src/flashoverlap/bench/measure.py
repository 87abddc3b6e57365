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

from ..torch.transport import transport_of
from ..trace import Span
from .candidates import Candidate
from .case import Case, case_of
from .contestant import Contestant, silent
from .options import Options
from .summary import Part
from .values import TOLERANCES, compare

_WARM_UP_ROUNDS = 1  # beside the run whose values are checked


class Bench:
    """One rank of a benchmark.

    Args:
        options: what to run.
        candidates: in the order of the result.
        group: the process group that the candidates use.
        barrier: brings all ranks to one point, by a channel that no candidate uses.
    """

    def __init__(
        self, options: Options, candidates: Sequence[Candidate], group: Any, barrier: Callable[[], object]
    ) -> None:
        self._options, self._candidates, self._group, self._barrier = options, candidates, group, barrier
        dtype = getattr(torch, options.dtype)
        self._tolerance = TOLERANCES[dtype]
        self._case = case_of(options.shape, dtype, group.rank(), group.size())
        self._reference = self._case.reference(options.train)
        self._contestants = [_contestant(each, self._case, group) for each in candidates]
        self.parts = [Part(each.row, note=each.note) for each in candidates]

    def run(self) -> list[Part]:
        """Checks all values, measures all candidates, and checks once more what the last round gave."""
        self._check_reduced()
        self._round(self._checked, 0)
        for number in range(_WARM_UP_ROUNDS):
            self._round(self._timed, number)
        for part in self.parts:
            part.seconds, part.other_cpu_s, part.blocked_s = [], [], []
        for number in range(self._options.repeats):
            self._round(self._timed, number)
        self._round(self._checked, 0)
        return self.parts

    def traces(self) -> dict[int, list[Span]]:
        """The spans of one further run of each candidate of mode flash, by its place among the candidates."""
        transport, found = transport_of(self._group), {}
        for index, candidate in enumerate(self._candidates):
            if candidate.row == "flash":
                self._barrier()
                transport.spans = found[index] = []
                _step(self._contestants[index], self._case, self._options.train)
                transport.spans = None
        return found

    def _round(self, visit: Callable[[int], None], first: int) -> None:
        """Visits every candidate once, each after a barrier, beginning with another one in each round."""
        count = len(self._candidates)
        gc.collect()
        gc.disable()  # a collection would fall into some candidate's time
        try:
            for place in range(count):
                visit((first + place) % count)
        finally:
            gc.enable()

    def _timed(self, index: int) -> None:
        part, runner = self.parts[index], self._contestants[index]
        fo.report().clear()
        runner.clear()
        self._barrier()
        other_s, start_s = time.process_time() - time.thread_time(), time.perf_counter()
        out = _step(runner, self._case, self._options.train)
        end_s = time.perf_counter()
        part.seconds.append(end_s - start_s)
        part.other_cpu_s.append(time.process_time() - time.thread_time() - other_s)
        del out
        records = fo.report().records
        if records:
            part.detail = ", ".join(dict.fromkeys(record.detail for record in records if record.detail))
            part.blocked_s.append(sum(record.blocked_s for record in records))
            part.sent_bytes = self._sent_bytes(index, sum(record.bytes for record in records))

    def _sent_bytes(self, index: int, counted: int) -> int | None:
        """What was sent; the report does not know what a backend's own collective sends."""
        overlap = self._candidates[index].overlap
        moves_none = self._candidates[index].silent or self._group.size() == 1
        return 0 if moves_none else None if overlap is None or overlap.mode == "collective" else counted

    def _checked(self, index: int) -> None:
        """Runs a candidate at the measured size and compares what it gives."""
        runner = self._contestants[index]
        runner.clear()
        self._barrier()
        out = _step(runner, self._case, self._options.train)
        if not self._candidates[index].silent:
            self._enter(index, {"out": out, **runner.gradients()}, self._reference, self._tolerance)
        runner.clear()

    def _enter(self, index: int, found: Any, reference: Any, tolerance: float, of: str = "") -> None:
        """Enters an error into the candidate's part; the errors of reduced sizes only where they are wrong."""
        error, complaint = compare(found, reference, tolerance)
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
                out = _step(runner, case, self._options.train)
                found = {"out": out, **runner.gradients()}
                self._enter(index, found, reference, TOLERANCES[torch.float64], f"at {shape} in float64: ")


def _contestant(candidate: Candidate, case: Case, group: Any) -> Contestant:
    """What a candidate stands for, on this rank."""
    if candidate.overlap is None:
        peer = import_module(f"flashoverlap.bench.peers.{candidate.row}")  # late: a peer may not be installed
        return peer.CONTESTANTS[case.shape.case](case, group)
    transport = silent(case.rank, case.world_size, case.dtype) if candidate.silent else group
    return case.contestant(group, transport, candidate.overlap)


def _step(runner: Contestant, case: Case, train: bool) -> torch.Tensor:
    """One pass: what is timed."""
    if train:
        out = runner.forward()
        runner.backward(out, case.grad)
        return out
    with torch.no_grad():
        return runner.forward()
