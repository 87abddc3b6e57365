"""Starts the ranks of a benchmark in a lab and makes one result of what they measured."""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import machine_file
from ..machine import Machine
from ..trace import Span, Trace
from .options import Options
from .peers import missing
from .summary import Part, as_json, summarize

_ENV = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # inside a lab no address has a name, which is no news


@dataclass(frozen=True)
class Outcome:
    """What a benchmark gave.

    Attributes:
        result: the JSON file's content.
        complaints: what was wrong with whose values; empty where all were right.
        notes: what else there is to say, a line each.
        trace: of one further run of flash, where it was asked for.
        machine: what plans went by; None of one rank.
    """

    result: dict[str, Any]
    complaints: list[str]
    notes: list[str]
    trace: Trace | None
    machine: Machine | None = None


def run(options: Options, timeout_s: float | None = None) -> Outcome:
    """Runs a benchmark to its end.

    Raises:
        LabError: the lab cannot be built here, a rank failed, or time ran out.
    """
    absent = {peer: note for peer in options.peers if (note := missing(peer))}
    options = replace(options, peers=tuple(peer for peer in options.peers if peer not in absent))
    with tempfile.TemporaryDirectory(prefix="flashoverlap-") as name, options.lab() as lab:
        directory = Path(name)
        (directory / "options.json").write_text(options.to_json(), encoding="utf-8")
        command = [sys.executable, "-m", "flashoverlap.bench.worker", str(directory)]
        unread = io.StringIO()  # an error repeats what was said last
        lab.run(command, env=_ENV, timeout_s=timeout_s, stdout=unread, stderr=unread)
        files = [directory / f"rank{rank}.json" for rank in range(options.ranks)]
        ranks = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        machine = next(map(machine_file.read, (directory / "machines0").glob("*.json")), None)
    summary = summarize([[Part(**part) for part in rank["parts"]] for rank in ranks])
    trace = _trace(ranks, summary.best.get("flash")) if options.trace else None
    return Outcome(as_json(options, summary.rows), summary.complaints, list(absent.values()), trace, machine)


def _trace(ranks: Sequence[dict[str, Any]], candidate: int | None) -> Trace | None:
    """The traced run of one candidate, over all ranks; time.monotonic is one clock on one machine."""
    if candidate is None:
        return None
    return Trace.merge(Trace.of(Span(*span) for span in rank["spans"][str(candidate)]) for rank in ranks)
