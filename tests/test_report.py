import inspect

import pytest
import torch

import flashoverlap.torch as fo
from flashoverlap.report import Record, Report
from ranks import run_ranks
from unsharded import COLUMN, MODES, ROW, Problem


def record(**changes):
    fields = {"site": "train.py:7", "op": "mlp", "mode_asked": "auto", "mode_taken": "flash"}
    return Record(**{**fields, "reason_code": "asked", "reason": "2 splits, as asked", "calls": 1, **changes})


def test_calls_of_one_site_add_up():
    report = Report()
    for _ in range(3):
        report.add(record(bytes=100, blocked_s=0.25))
    report.add(record(site="train.py:8"))
    assert [(r.site, r.calls, r.bytes, r.blocked_s) for r in report] == [
        ("train.py:7", 3, 300, 0.75),
        ("train.py:8", 1, 0, 0.0),
    ]
    assert len(report) == 2
    assert report[1].site == "train.py:8"


def test_predictions_add_up_unless_a_call_had_none():
    report = Report()
    for predicted_s in (0.5, 0.25):
        report.add(record(seconds=1.0, predicted_s=predicted_s, predicted_exposed_s=0.125))
    assert (report[0].seconds, report[0].predicted_s, report[0].predicted_exposed_s) == (2.0, 0.75, 0.25)
    assert "750.0" in str(report)
    report.add(record(seconds=1.0))
    assert (report[0].seconds, report[0].predicted_s, report[0].predicted_exposed_s) == (3.0, None, None)


def test_notes_stand_below_the_table():
    report = Report()
    report.add(record())
    report.note("the wire changed")
    assert str(report).splitlines()[2:] == ["the wire changed"]
    assert report.notes == ("the wire changed",)
    report.clear()
    assert report.notes == ()


def test_another_outcome_at_the_same_site_is_another_record():
    report = Report()
    for change in (
        {},
        {"mode_taken": "off"},
        {"reason_code": "one_rank"},
        {"op": "mlp backward"},
        {"detail": "ring x2"},
    ):
        report.add(record(**change))
    assert len(report) == 5


def test_layers_that_do_alike_are_added_up():
    report = Report()
    for layer in range(12):
        taken = "off" if layer == 7 else "flash"
        report.add(
            record(site=f"h.{layer}.mlp", mode_taken=taken, bytes=100, blocked_s=0.25, seconds=0.5, predicted_s=1.0)
        )
        report.add(record(site=f"h.{layer}.experts.{layer % 3}", op="linear", predicted_s=1.0 if layer else None))
    for site in ("train.py:7", "train.py:8", "h2.mlp"):
        report.add(record(site=site))
    report.note("the wire changed")
    added = report.by_layer()
    assert [(r.site, r.mode_taken, r.calls) for r in added] == [
        ("h.*.mlp", "flash", 11), ("h.*.experts.*", "flash", 12), ("h.7.mlp", "off", 1),
        ("train.py:7", "flash", 1), ("train.py:8", "flash", 1), ("h2.mlp", "flash", 1),
    ]  # fmt: skip
    assert (added[0].bytes, added[0].blocked_s, added[0].seconds, added[0].predicted_s) == (1100, 2.75, 5.5, 11.0)
    assert added[1].predicted_s is None
    assert added.notes == ("the wire changed",)
    assert len(report) == 27
    assert report[0].calls == 1


def test_a_report_of_records_goes_its_own_way():
    report = Report()
    report.add(record())
    kept = Report.of(report, ["until now"])
    report.add(record())
    assert (kept[0].calls, report[0].calls) == (1, 2)
    assert (kept.notes, report.notes) == (("until now",), ())


def test_prints_as_a_table_and_forgets():
    report = Report()
    report.add(record(bytes=2_500_000, blocked_s=0.0015, detail="direct x2"))
    head, row = str(report).splitlines()
    assert head.split("  ")[0] == "call site"
    for said in ("train.py:7", "mlp", "auto", "flash direct x2", "1", "2.5", "asked: 2 splits, as asked"):
        assert said in row
    report.clear()
    assert len(report) == 0


# --- what the operators enter -----------------------------------------------------------------------------------------


def entered(n, main):
    fo.report().clear()
    run_ranks(n, main)
    return {r.op: r for r in fo.report()}


@pytest.mark.parametrize(
    ("overlap", "taken", "code", "detail"),
    [
        (fo.Overlap(), "flash", "rule_of_thumb", "direct x1"),
        (fo.Overlap(splits=2), "flash", "asked", "direct x2"),
        (fo.Overlap("flash", pattern="ring", splits=3), "flash", "asked", "ring x3"),
        (fo.Overlap("slice", slices=3), "slice", "asked", "sliced x3"),
        (fo.Overlap("slice"), "slice", "asked", "sliced x4"),
        (fo.Overlap("off"), "off", "asked", ""),
        (fo.Overlap("collective"), "collective", "asked", ""),
    ],
    ids=str,
)
def test_what_was_asked_for_and_what_was_taken_and_why(overlap, taken, code, detail):
    records = entered(2, lambda rank, group: Problem(COLUMN, (6, 5), 0).check(rank, group, overlap))
    assert set(records) == {"all_gather_linear", "all_gather_linear backward"}
    for found in records.values():
        assert (found.mode_asked, found.mode_taken, found.reason_code, found.detail) == (
            overlap.mode,
            taken,
            code,
            detail,
        )
        assert found.reason
        assert found.calls == 2  # the ranks are threads of one process here
        assert found.blocked_s >= 0


def test_one_rank_moves_nothing_and_says_so():
    records = entered(1, lambda rank, group: Problem(COLUMN, (6, 5), 0).check(rank, group))
    assert {(r.reason_code, r.bytes) for r in records.values()} == {("one_rank", 0)}


@pytest.mark.parametrize("overlap", MODES, ids=str)
def test_the_bytes_are_the_ideal_ones(overlap):
    n, rows, item = 3, 7, 8
    x = torch.ones(rows, 4, dtype=torch.float64)

    def main(rank, group):
        own, w = x.tensor_split(n)[rank].clone().requires_grad_(), torch.ones(2, 4, dtype=x.dtype, requires_grad=True)
        y = fo.all_gather_linear(own, w, group=group, overlap=overlap)
        z = fo.linear_reduce_scatter(
            y, torch.ones(5, 2, dtype=x.dtype, requires_grad=True), group=group, overlap=overlap
        )
        u = fo.all_reduce_grad_linear(x.clone().requires_grad_(), w, group=group, overlap=overlap)
        a = fo.linear_all_reduce(u, torch.ones(5, 2, dtype=x.dtype), group=group, overlap=overlap)
        (z.sum() + a.sum()).backward()
        h = own.detach().requires_grad_()
        fo.mlp(h, torch.ones(2, 4, dtype=x.dtype), torch.ones(5, 2, dtype=x.dtype), group=group, overlap=overlap).sum()

    records = entered(n, main)
    once = rows * (n - 1) * item  # over all ranks, of one column
    assert {op: r.bytes for op, r in records.items()} == {
        "all_gather_linear": 4 * once,
        "linear_reduce_scatter": 5 * once,
        "linear_all_reduce": 2 * 5 * once,
        "all_reduce_grad_linear backward": 2 * 4 * once,
        "linear_reduce_scatter backward": 5 * once,
        "all_gather_linear backward": (4 + 4) * once,
        "mlp": (4 + 5) * once,
    }


def test_the_call_site_is_the_callers_line_in_forward_and_backward():
    def main(rank, group):
        tensors = Problem(ROW, (6, 5), 0).shards(rank, 2)
        line = inspect.currentframe().f_lineno + 1
        z = fo.linear_reduce_scatter(tensors["x"], tensors["w"], group=group)
        z.sum().backward()
        return line

    fo.report().clear()
    line, _ = run_ranks(2, main)
    assert {r.site for r in fo.report()} == {f"test_report.py:{line}"}
