"""What happened when: the spans of one run, simulated or real, and what they say about exposed time.

The simulator and the executor both return a :class:`Trace`, so that exposed time is computed by one function for both.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

TRACKS = ("compute", "blocked", "send", "recv")


class Span(NamedTuple):
    """What ``rank`` did from ``start_s`` to ``end_s``, on one of :data:`TRACKS`; ``peer`` is the other side."""

    rank: int
    track: str
    name: str
    start_s: float
    end_s: float
    bytes: int = 0
    peer: int = -1


class Totals(NamedTuple):
    """One rank's run in four numbers: when it began and ended, how long it computed, how long it stood waiting."""

    start_s: float
    end_s: float
    compute_s: float
    blocked_s: float

    @property
    def elapsed_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Trace:
    """One run of all ranks on one clock; made from spans by :meth:`of`.

    Args:
        totals: one entry a rank.
        spans: every span in order of (rank, start). Left empty to save memory, it leaves only totals to ask for.
    """

    totals: tuple[Totals, ...]
    spans: tuple[Span, ...] = ()

    @staticmethod
    def of(spans: Iterable[Span], ranks: int | None = None) -> Trace:
        """The trace of these spans, with times as they are; a rank without spans did nothing.

        Args:
            spans: in any order.
            ranks: number of ranks; as many as the spans name unless given.

        Raises:
            ValueError: a span of an unknown track or rank, of a time that is not finite, or that ends before it starts.
        """
        ordered = sorted(spans, key=attrgetter("rank", "start_s", "track", "end_s", "name"))
        count = max((span.rank + 1 for span in ordered), default=0) if ranks is None else ranks
        for span in ordered:
            _check(span, count)
        by_rank: list[list[Span]] = [[] for _ in range(count)]
        for span in ordered:
            by_rank[span.rank].append(span)
        origin = min((span.start_s for span in ordered), default=0.0)
        return Trace(tuple(_totals(of_rank, origin) for of_rank in by_rank), tuple(ordered))

    @staticmethod
    def merge(traces: Iterable[Trace]) -> Trace:
        """One trace of the parts that the ranks recorded, shifted so that the earliest time is 0.

        Transfers are put together from their halves ([Note: two halves]).

        The parts must be on one clock. ``time.monotonic`` is one between the processes of one machine; :meth:`shifted`
        brings the parts of other machines onto it.

        Raises:
            ValueError: a part holds totals only.
        """
        parts = list(traces)
        for part in parts:
            part._need_spans("merge")
        ranks = max((part.ranks for part in parts), default=0)
        whole = Trace.of(_joined(span for part in parts for span in part.spans), ranks)
        return whole.shifted(-min((totals.start_s for totals in whole.totals), default=0.0))

    def shifted(self, seconds: float) -> Trace:
        """The same run on a clock that shows ``seconds`` more."""
        totals = (t._replace(start_s=t.start_s + seconds, end_s=t.end_s + seconds) for t in self.totals)
        spans = (s._replace(start_s=s.start_s + seconds, end_s=s.end_s + seconds) for s in self.spans)
        return Trace(tuple(totals), tuple(spans))

    @property
    def ranks(self) -> int:
        return len(self.totals)

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start of any rank to the last end of any."""
        if not self.totals:
            return 0.0
        return max(t.end_s for t in self.totals) - min(t.start_s for t in self.totals)

    def compute_s(self, rank: int) -> float:
        """Seconds that ``rank`` computed."""
        return self.totals[rank].compute_s

    def blocked_s(self, rank: int) -> float:
        """Seconds that the program of ``rank`` stood waiting."""
        return self.totals[rank].blocked_s

    def busy_s(self, rank: int, track: str) -> float:
        """Seconds in which ``rank`` had at least one span of ``track`` under way.

        Raises:
            ValueError: an unknown track, or a wire's track of a trace that holds totals only.
        """
        if track not in TRACKS:
            raise ValueError(f"unknown track {track!r}; known: {', '.join(TRACKS)}")
        if track in ("send", "recv"):
            self._need_spans(f"tell how long {track!r} was busy")
            return _covered(span for span in self.spans if span.rank == rank and span.track == track)
        return self.compute_s(rank) if track == "compute" else self.blocked_s(rank)

    def perfetto(self) -> dict[str, Any]:
        """The run as a Chrome trace, which ui.perfetto.dev opens: a process a rank, its program above its wire.

        Slices of one thread nest or are disjoint (google/perfetto#503): what overlaps goes to a further thread.

        Raises:
            ValueError: the trace holds totals only.
        """
        self._need_spans("draw a timeline")
        origin = min((span.start_s for span in self.spans), default=0.0)
        by_rank: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in self.spans:
            by_rank[span.rank].append(span)
        events = [event for rank, spans in enumerate(by_rank) for event in _process_events(spans, rank, origin)]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes :meth:`perfetto` to ``path`` as JSON: the whole file, or on an error none."""
        target = Path(path)
        text = json.dumps(self.perfetto(), allow_nan=False)
        unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, target)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def _need_spans(self, what: str) -> None:
        if not self.spans and any(t.elapsed_s or t.compute_s for t in self.totals):
            raise ValueError(f"cannot {what}: this trace holds totals only; simulate(..., spans=True) keeps the spans")


def exposed_seconds(trace: Trace, compute_s: float | None = None) -> float:
    """The time that communication added: what the slowest rank took, less the time of its computation.

    Args:
        trace: of a simulated or a real run.
        compute_s: seconds of the same computation with nothing moved, unsplit; the slowest rank's own compute spans
            unless given. Below 0 the run took less than that.
    """
    if not trace.totals:
        return 0.0
    slowest = max(trace.totals, key=lambda totals: (totals.elapsed_s, totals.compute_s))
    return slowest.elapsed_s - (slowest.compute_s if compute_s is None else compute_s)


# [Note: two halves] A sender knows when it posted a transfer and when its bytes had been taken from it, which on a
# socket is long before they are on the wire; a receiver knows when it was ready, which may be long before anything
# came, and when all had arrived. Together they tell when the wire was busy: from the posting, once the transfers before
# it of both ranks were through, until the arrival. Neither half alone may be drawn as a busy wire.
def _joined(spans: Iterable[Span]) -> list[Span]:
    """The spans, with the k-th send from one rank to another and the k-th receive there brought to the same times."""
    rest: list[Span] = []
    halves: dict[tuple[int, int], tuple[list[Span], list[Span]]] = {}
    for span in sorted(spans, key=attrgetter("start_s")):
        if span.peer < 0 or span.track not in ("send", "recv"):
            rest.append(span)
        else:
            pair = (span.rank, span.peer) if span.track == "send" else (span.peer, span.rank)
            halves.setdefault(pair, ([], []))[span.track == "recv"].append(span)
    free_s: dict[tuple[str, int], float] = {}
    pairs = [pair for sends, receives in halves.values() for pair in zip(sends, receives, strict=False)]
    for send, receive in sorted(pairs, key=lambda pair: pair[1].end_s):
        ports = ("send", send.rank), ("recv", receive.rank)
        begin_s = min(max(send.start_s, *(free_s.get(port, send.start_s) for port in ports)), receive.end_s)
        free_s.update(dict.fromkeys(ports, receive.end_s))
        rest += (half._replace(start_s=begin_s, end_s=receive.end_s) for half in (send, receive))
    unpaired = (half for sends, receives in halves.values() for half in sends[len(receives) :] + receives[len(sends) :])
    return [*rest, *unpaired]


def _check(span: Span, ranks: int) -> None:
    if span.track not in TRACKS:
        raise ValueError(f"unknown track {span.track!r} in {span}; known: {', '.join(TRACKS)}")
    if not 0 <= span.rank < ranks:
        raise ValueError(f"rank {span.rank} of {span} is not one of {ranks} ranks")
    if not (math.isfinite(span.start_s) and math.isfinite(span.end_s) and span.start_s <= span.end_s):
        raise ValueError(f"a span needs finite times and may not end before it starts: {span}")


def _totals(spans: Sequence[Span], origin: float) -> Totals:
    start = min((span.start_s for span in spans), default=origin)
    end = max((span.end_s for span in spans), default=origin)
    compute, blocked = (_covered(span for span in spans if span.track == track) for track in ("compute", "blocked"))
    return Totals(start, end, compute, blocked)


def _covered(spans: Iterable[Span]) -> float:
    """Seconds covered by spans that come in order of their start, overlaps counted once."""
    total, reached = 0.0, -math.inf
    for span in spans:
        if span.end_s > reached:
            total += span.end_s - max(span.start_s, reached)
            reached = span.end_s
    return total


def _process_events(spans: Sequence[Span], rank: int, origin: float) -> list[dict[str, Any]]:
    """Events of one rank. Its pid is ``rank + 1``, since tools take process 0 for the idle one."""
    pid = rank + 1
    events: list[dict[str, Any]] = [_metadata("process_name", pid, 0, name=f"rank {rank}")]
    events.append(_metadata("process_sort_index", pid, 0, sort_index=rank))
    tid = 0
    for title, tracks in (("compute", ("compute", "blocked")), ("wire out", ("send",)), ("wire in", ("recv",))):
        for number, lane in enumerate(_lanes([span for span in spans if span.track in tracks], origin)):
            tid += 1
            events.append(_metadata("thread_name", pid, tid, name=title if number == 0 else f"{title} {number + 1}"))
            events.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
            events += [_slice(span, pid, tid, start, end) for span, start, end in lane]
    return events


def _lanes(spans: Sequence[Span], origin: float) -> list[list[tuple[Span, int, int]]]:
    """Spreads spans, each with its start and end in whole nanoseconds, over as few lanes as keep them disjoint.

    Whole nanoseconds, since neighbours whose float times touch can overlap by a rounding error.
    """
    timed = [(span, round((span.start_s - origin) * 1e9), round((span.end_s - origin) * 1e9)) for span in spans]
    lanes: list[list[tuple[Span, int, int]]] = [[]]
    for item in sorted(timed, key=lambda item: item[1:]):
        free = next((lane for lane in lanes if not lane or lane[-1][2] <= item[1]), None)
        if free is None:
            lanes.append(free := [])
        free.append(item)
    return lanes


def _metadata(kind: str, pid: int, tid: int, **args: object) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _slice(span: Span, pid: int, tid: int, start_ns: int, end_ns: int) -> dict[str, Any]:
    event: dict[str, Any] = {
        "name": f"wait {span.name}" if span.track == "blocked" else span.name,
        "cat": span.track,
        "ph": "X",
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "pid": pid,
        "tid": tid,
    }
    if span.bytes:
        event["args"] = {"bytes": span.bytes}
    return event
