"""Slices of heads and of sequences: their values, what is cut, and in which order all-to-alls start and are waited for."""

from __future__ import annotations

import threading

import pytest
import torch

from flashoverlap.bench.all_to_all import AllToAll, Waits
from flashoverlap.bench.candidates import candidates
from flashoverlap.bench.case import case_of
from flashoverlap.bench.measure import Bench
from flashoverlap.bench.options import Options
from flashoverlap.bench.shapes import AttentionShape, UlyssesShape
from flashoverlap.bench.slices import SlicedSequences, SlicedUlysses, slices_of_heads
from flashoverlap.bench.summary import summarize
from flashoverlap.bench.values import compare
from flashoverlap.overlap import Overlap
from ranks import named, run_ranks

NONE = (range(0), range(0))


# --- what is cut


@pytest.mark.parametrize(
    ("kv_heads", "readers", "count", "slices"),
    [
        (range(2, 4), 1, 2, [(range(2, 3), range(2, 3)), (range(3, 4), range(3, 4))]),
        (range(3), 2, 2, [(range(4), range(2)), (range(4, 6), range(2, 3))]),  # whole key and value heads
        (range(1, 2), 4, 2, [(range(4, 6), range(1, 2)), (range(6, 8), range(2, 2))]),  # the second comes with none
        (range(2), 2, 3, [(range(1), range(1)), (range(1, 2), range(1, 1)), (range(2, 4), range(1, 2))]),
        (range(1), 1, 3, [(range(1), range(1)), NONE, NONE]),
        (range(2, 2), 4, 2, [NONE, NONE]),
    ],
)
def test_slices_of_heads(kv_heads, readers, count, slices):
    found = slices_of_heads(kv_heads, readers, count)
    assert [(list(one.heads), list(one.kv_heads)) for one in found] == [(list(a), list(b)) for a, b in slices]


@pytest.mark.parametrize(
    ("shape", "slices"),
    [
        (UlyssesShape(), (2, 4, 8)),
        (UlyssesShape(heads=8, kv_heads=2), (2, 4)),  # of 4 heads a rank
        (UlyssesShape(heads=2, kv_heads=2), (1,)),
        (AttentionShape(batch=1), (2, 4, 8)),
        (AttentionShape(batch=3), (2, 3)),
    ],
)
def test_no_number_of_slices_is_tried_twice(shape, slices):
    found = candidates(Options(shape, modes=("slice",)))
    assert tuple(one.overlap.slices for one in found if one.row == "slice") == slices


# --- values


@pytest.mark.parametrize("train", [False, True], ids=["forward", "train"])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("shape", "ranks", "kind", "most"),
    [
        (UlyssesShape(8, 32, 4, 4, 1), 1, SlicedUlysses, 4),
        (UlyssesShape(8, 32, 4, 2, 1), 2, SlicedUlysses, 2),
        (UlyssesShape(7, 24, 6, 3, 2, causal=True), 2, SlicedUlysses, 4),
        (UlyssesShape(8, 40, 10, 5, 1), 3, SlicedUlysses, 4),
        (UlyssesShape(7, 48, 12, 2, 3, causal=True), 3, SlicedUlysses, 6),  # a rank without heads
        (AttentionShape(8, 32, 4, 4, 2), 1, SlicedSequences, 2),
        (AttentionShape(7, 24, 6, 3, 3, causal=True), 2, SlicedSequences, 3),
        (AttentionShape(7, 40, 10, 5, 2), 3, SlicedSequences, 2),
    ],
    ids=named,
)
def test_slices_give_what_the_unsharded_attention_gives(shape, ranks, kind, most, count, train):
    def check(rank, group):
        case = case_of(shape, torch.float64, rank, ranks)
        sliced = case.contestant(group, group, Overlap("slice", slices=count))
        assert isinstance(sliced, kind)
        assert sliced.detail.split()[0] == str(min(count, most))
        for _ in range(2):  # what a run leaves behind is not in the way of the next
            sliced.clear()
            results = sliced.results(sliced.run(case.grad if train else None))
            reference = case.reference(train)
            assert results.keys() == reference.keys()
            assert compare(results, reference, 1e-10)[1] == ""

    run_ranks(ranks, check)


def test_one_sequence_is_cut_by_rows():
    def check(rank, group):
        case = case_of(AttentionShape(33, 32, 4, 2), torch.float64, rank, 2)
        sliced = case.contestant(group, group, Overlap("slice", slices=4))
        assert sliced.detail == "4 slices of rows"
        return compare(sliced.results(sliced.run(case.grad)), case.reference(True), 1e-10)[1]

    assert run_ranks(2, check) == ["", ""]


# --- the all-to-all, and its order


def test_an_all_to_all_of_unequal_parts_and_its_gradient():
    parts = [[1, 2, 0], [0, 3, 1], [2, 2, 2]]  # from rank, to rank

    def exchange(rank, group):
        flat = torch.arange(sum(parts[rank]), dtype=torch.float64) + 10 * rank
        flat.requires_grad_()
        waits = Waits()
        flight = AllToAll(group, parts[rank], [row[rank] for row in parts], waits).start(flat)
        out = flight.arrived()
        out.backward(out.detach() * 2)
        assert waits.seconds > 0
        assert torch.equal(flat.grad, 2 * flat.detach())
        return out.tolist()

    assert run_ranks(3, exchange) == [[0, 20, 21], [1, 2, 10, 11, 12, 22, 23], [13, 24, 25]]


@pytest.mark.parametrize(
    ("shape", "events"),
    [
        (UlyssesShape(8, 32, 4, 4), "start start | wait start wait start | wait wait"),
        (AttentionShape(8, 32, 4, 4, 2), "start start | wait wait"),
    ],
)
def test_a_slice_flies_while_the_next_one_computes_in_both_directions(monkeypatch, shape, events):
    local = threading.local()
    for name, told in (("post", "start"), ("finish", "wait")):
        right = getattr(AllToAll, name)

        def noted(self, *args, _right=right, _told=told):
            local.seen.append(_told)
            return _right(self, *args)

        monkeypatch.setattr(AllToAll, name, noted)

    def order(rank, group):
        local.seen = []
        case = case_of(shape, torch.float64, rank, 2)
        sliced = case.contestant(group, group, Overlap("slice", slices=2))
        out = sliced.forward()
        forward = list(local.seen)
        local.seen.clear()
        sliced.backward(out, case.grad)
        return forward, local.seen

    expected = [event for event in events.split() if event != "|"]
    for found in run_ranks(2, order):
        assert found == (expected, expected)


# --- rows of the result


@pytest.mark.parametrize("phase", ["forward", "train"])
@pytest.mark.parametrize(
    ("shape", "details", "counted"),
    [
        (UlyssesShape(32, 32, 8, 4), ("2 slices of heads", "4 slices of heads"), False),
        (AttentionShape(33, 32, 4, 2, 2), ("2 slices of sequences",), False),
        (AttentionShape(33, 32, 4, 2), ("2 slices of rows", "4 slices of rows", "8 slices of rows"), True),
    ],
    ids=["heads", "sequences", "rows"],
)
def test_the_row_says_what_was_cut_and_no_more_than_is_known(shape, details, counted, phase):
    options = Options(shape, link="none", phase=phase, repeats=1, modes=("slice", "collective"))
    barrier = threading.Barrier(2)
    ranks = run_ranks(2, lambda rank, group: Bench(options, candidates(options), group, barrier.wait).run())
    assert [part.complaint for parts in ranks for part in parts] == [""] * sum(map(len, ranks))
    assert tuple(part.detail for part in ranks[0] if part.row == "slice") == details
    summary = summarize(ranks)
    row = next(row for row in summary.rows if row.mode == "slice")
    assert row.detail.partition(" (best of ")[0] in details
    assert (row.wire_bytes is not None) == counted
    assert row.blocked_seconds is not None
    assert row.max_abs_error > 0


@pytest.mark.parametrize("kind", [SlicedUlysses, SlicedSequences], ids=named)
def test_wrong_slices_are_seen_at_the_reduced_size(monkeypatch, kind):
    shape = UlyssesShape(32, 32, 4, 2) if kind is SlicedUlysses else AttentionShape(32, 32, 4, 2, 2)
    right = kind.forward

    def wrong(self):
        out = right(self)
        return out * 1.01 if self._case.dtype == torch.float64 and self._case.rank == 1 else out

    monkeypatch.setattr(kind, "forward", wrong)
    options = Options(shape, link="none", repeats=1, modes=("slice", "flash"))
    barrier = threading.Barrier(2)
    ranks = run_ranks(2, lambda rank, group: Bench(options, candidates(options), group, barrier.wait).run())
    told = {(rank, part.row) for rank, parts in enumerate(ranks) for part in parts if part.complaint}
    assert told == {(1, "slice")}
