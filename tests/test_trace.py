import json
import os
from collections import defaultdict

import pytest

from flashoverlap import patterns
from flashoverlap.machine import Kernel, Link, Machine
from flashoverlap.simulate import simulate
from flashoverlap.trace import Span, Totals, Trace, exposed_seconds

TWO_RANKS = (
    Span(0, "compute", "mm y0", 10.0, 12.0),
    Span(0, "blocked", "x1", 12.0, 13.0),
    Span(0, "compute", "mm y1", 13.0, 15.0),
    Span(0, "recv", "x1", 10.5, 13.0, 64),
    Span(1, "send", "x1", 10.5, 13.0, 64),
    Span(1, "compute", "mm y1", 10.5, 12.5),
)


def strictly_read(document):
    """Checks what Chrome's trace format leaves to hope, and returns {(pid, tid): [(start_ns, end_ns, name)]}."""
    threads, named = defaultdict(list), set()
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is int
        assert event["pid"] > 0
        if event["ph"] == "M":
            named.add((event["pid"], event["tid"], event["name"]))
            continue
        assert event["ph"] == "X"
        assert type(event["ts"]) in (int, float)
        assert type(event["dur"]) in (int, float)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        start = round(event["ts"] * 1000)
        threads[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1000), event["name"]))
    for (pid, tid), slices in threads.items():
        assert (pid, 0, "process_name") in named
        assert (pid, tid, "thread_name") in named
        open_until = []
        for start, end, name in sorted(slices, key=lambda s: (s[0], -s[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"{name} overlaps its neighbour in part"
            open_until.append(end)
    return threads


def threads_by_name(document):
    titles = {(e["pid"], e["tid"]): e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    return {(pid - 1, titles[pid, tid]): slices for (pid, tid), slices in strictly_read(document).items()}


def test_totals_of_each_rank():
    trace = Trace.of(TWO_RANKS)
    assert trace.totals == (Totals(10.0, 15.0, 4.0, 1.0), Totals(10.5, 13.0, 2.0, 0.0))
    assert trace.ranks == 2
    assert trace.makespan_s == 5.0
    assert (trace.compute_s(0), trace.blocked_s(0)) == (4.0, 1.0)
    assert [trace.busy_s(0, track) for track in ("compute", "blocked", "send", "recv")] == [4.0, 1.0, 0.0, 2.5]


def test_busy_time_counts_overlapping_transfers_once():
    spans = [
        Span(0, "send", name, start, end) for name, start, end in (("a", 0, 4), ("b", 1, 2), ("c", 3, 6), ("d", 8, 9))
    ]
    assert Trace.of(spans).busy_s(0, "send") == 7


def test_exposed_seconds_are_those_of_the_slowest_rank():
    trace = Trace.of(TWO_RANKS)
    assert exposed_seconds(trace) == 1.0
    assert exposed_seconds(trace, compute_s=3.5) == 1.5
    assert exposed_seconds(Trace(())) == 0.0


def test_a_trace_of_totals_answers_what_it_can_and_refuses_the_rest():
    trace = Trace((Totals(0.0, 5.0, 4.0, 1.0),))
    assert trace.makespan_s == 5.0
    assert exposed_seconds(trace) == trace.busy_s(0, "blocked") == 1.0
    for ask in (lambda: trace.busy_s(0, "send"), trace.perfetto, lambda: Trace.merge([trace])):
        with pytest.raises(ValueError, match=r"holds totals only; simulate\(\.\.\., spans=True\)"):
            ask()


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (Span(0, "net", "x", 0, 1), "unknown track 'net'"),
        (Span(2, "send", "x", 0, 1), "rank 2 of .* is not one of 2 ranks"),
        (Span(0, "send", "x", 1, 0), "may not end before it starts"),
        (Span(0, "send", "x", 0, float("nan")), "finite times"),
    ],
)
def test_spans_are_checked(span, message):
    with pytest.raises(ValueError, match=message):
        Trace.of([span], ranks=2)


def test_an_unknown_track_is_refused():
    with pytest.raises(ValueError, match="unknown track 'net'; known: compute, blocked, send, recv"):
        Trace.of(TWO_RANKS).busy_s(0, "net")


def test_merging_the_parts_of_ranks_aligns_them_at_zero():
    parts = [Trace.of([span for span in TWO_RANKS if span.rank == rank], ranks=2) for rank in (0, 1)]
    merged = Trace.merge(reversed(parts))
    assert merged == Trace.of(TWO_RANKS).shifted(-10.0)
    assert merged.spans[0].start_s == 0.0
    assert merged.totals[1] == Totals(0.5, 3.0, 2.0, 0.0)
    assert Trace.merge([]) == Trace(())


def test_the_timeline_of_a_rank_has_its_program_above_its_wire():
    document = Trace.of(TWO_RANKS).perfetto()
    assert threads_by_name(document) == {
        (0, "compute"): [(0, 2 * 10**9, "mm y0"), (2 * 10**9, 3 * 10**9, "wait x1"), (3 * 10**9, 5 * 10**9, "mm y1")],
        (0, "wire in"): [(5 * 10**8, 3 * 10**9, "x1")],
        (1, "compute"): [(5 * 10**8, 25 * 10**8, "mm y1")],
        (1, "wire out"): [(5 * 10**8, 3 * 10**9, "x1")],
    }
    assert {event["args"]["bytes"] for event in document["traceEvents"] if event.get("cat") in ("send", "recv")} == {64}


def test_transfers_in_flight_together_get_lanes_of_their_own():
    machine = Machine(Link(0.0, 1.0), {"mm": Kernel(0.0, 0.1)}, ports=3)
    trace = simulate(patterns.all_gather_matmul([4] * 4), machine)
    assert {thread for rank, thread in threads_by_name(trace.perfetto()) if rank == 1} == {
        "compute",
        *("wire out", "wire out 2", "wire out 3"),
        *("wire in", "wire in 2", "wire in 3"),
    }


def test_rounding_makes_no_neighbours_overlap():
    times = [12345.678 + index * (1e-6 / 3) for index in range(1000)]
    spans = [Span(0, "send", str(index), times[index], times[index + 1]) for index in range(999)]
    assert len(strictly_read(Trace.of(spans).perfetto())) == 1


def test_two_layers_of_three_ranks_in_four_chunks_with_odd_names(tmp_path):
    """google/perfetto#503, Ascend/pytorch#133, hw-native-sys/simpler#2058."""
    machine = Machine(Link(1e-4, 1e6), {"mm": Kernel(1e-5, 1e-6)}, issue_s=1e-6)
    layers = [patterns.all_gather_matmul([7, 0, 9], splits=4), patterns.matmul_reduce_scatter([7, 0, 9], splits=4)]
    first, second = (simulate(layer, machine) for layer in layers)
    whole = Trace.of((*first.spans, *second.shifted(first.makespan_s).spans)).shifted(98765.4321)
    quoted = 'layers["0"].\'mlp\' \\ "up"\n✓'
    parts = [
        Trace.of([*(s for s in whole.spans if s.rank == rank), Span(rank, "compute", quoted, 98765.5, 98765.5)], 3)
        for rank in range(3)
    ]
    merged = Trace.merge(parts)
    assert merged.totals[0].start_s == pytest.approx(first.totals[0].start_s, abs=2e-6)
    assert merged.makespan_s == pytest.approx(max(first.makespan_s + second.makespan_s, 98765.5 - 98765.4321), abs=1e-5)
    path = tmp_path / "trace.json"
    merged.save(path)
    threads = strictly_read(json.loads(path.read_text(encoding="utf-8")))
    names = [name for slices in threads.values() for _, _, name in slices]
    assert names.count(quoted) == 3
    assert any(start == end for slices in threads.values() for start, end, _ in slices)
    assert {pid for pid, _ in threads} == {1, 2, 3}


def test_a_file_is_whole_or_is_not_there(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    Trace.of(TWO_RANKS).save(path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        Trace.of(TWO_RANKS[:1]).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_trace_can_be_saved(tmp_path):
    Trace(()).save(tmp_path / "empty.json")
    assert json.loads((tmp_path / "empty.json").read_text())["traceEvents"] == []
    assert strictly_read(Trace.of([], ranks=2).perfetto()) == {}


def test_a_merged_transfer_is_drawn_as_busy_from_its_posting_to_its_arrival_and_no_longer():
    # rank 1 was ready for both pieces at 0; rank 0 posted them at 2 and 2.5, and the kernel took them at once
    sender = Trace.of([Span(0, "send", "a to 1", 2.0, 2.1, 8, 1), Span(0, "send", "b to 1", 2.5, 2.6, 8, 1)], 2)
    receiver = Trace.of([Span(1, "recv", "a", 0.0, 4.0, 8, 0), Span(1, "recv", "b", 0.0001, 5.0, 8, 0)], 2)
    merged = Trace.merge([sender, receiver])
    times = {(span.name, span.track): (span.start_s, span.end_s) for span in merged.spans}
    assert times[("a to 1", "send")] == times[("a", "recv")] == (0.0, 2.0)
    assert times[("b to 1", "send")] == times[("b", "recv")] == (2.0, 3.0)
    assert merged.busy_s(1, "recv") == 3.0
    alone = Trace.merge([sender])
    assert [span.end_s - span.start_s for span in alone.spans] == pytest.approx([0.1, 0.1])
