"""The benchmark: what it refuses, what it computes from measurements, that it sees wrong values, and whole runs."""

from __future__ import annotations

import json
import math
import threading

import pytest
import torch

from flashoverlap.bench.candidates import candidates
from flashoverlap.bench.case import case_of
from flashoverlap.bench.measure import Bench
from flashoverlap.bench.mlp import Mlp
from flashoverlap.bench.options import Options
from flashoverlap.bench.peers import missing
from flashoverlap.bench.predicted import said
from flashoverlap.bench.run import run
from flashoverlap.bench.shapes import MlpShape
from flashoverlap.bench.summary import Part, as_json, summarize
from flashoverlap.bench.table import table, title
from flashoverlap.bench.values import compare
from flashoverlap.lab import lab_unavailable
from flashoverlap.report import Record
from ranks import run_ranks

SMALL = MlpShape(64, 16, 32)
TIMES = ("seconds", "seconds_min", "seconds_max", "exposed_seconds", "wire_cpu_seconds")
COLUMNS = {
    "mode", "detail", *TIMES, "predicted_seconds", "blocked_seconds", "communication_reduction", "latency_reduction", "wire_bytes",
    "max_abs_error", "first_matmul_seconds", "gradients_ready_seconds", "peak_bytes",
}  # fmt: skip


# --- options and candidates


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"modes": ("off", "fast")}, "--modes fast"),
        ({"modes": ("off", "off")}, "--modes off,off"),
        ({"peers": ("horovod",)}, "--peers horovod"),
        ({"phase": "backward"}, "--pass backward"),
        ({"dtype": "int8"}, "--dtype int8"),
        ({"pattern": "star"}, "--pattern star"),
        ({"repeats": 0}, "--repeats 0"),
        ({"splits": "0"}, "--splits 0"),
        ({"splits": "many"}, "--splits many"),
        ({"ranks": 0}, "not 0"),
        ({"link": "fast"}, "'fast'"),
        ({"nodes": 2}, "nodes 2 need a link and an uplink with a rate, not '1gbit' and None"),
        ({"nodes": 3, "uplink": "1gbit"}, "ranks 2 can be on 1 to 2 nodes, not 3"),
        ({"uplink": "1gbit"}, "uplink '1gbit' goes between nodes, and there is one"),
        ({"trace": True, "modes": ("off",)}, "--trace"),
        ({"shape": MlpShape(0, 16, 32)}, "--seq 0"),
        ({"shape": MlpShape(64, 16, -1)}, "--ffn -1"),
        ({"shape": MlpShape(65, 16, 32), "peers": ("dtensor",)}, "--seq 65"),
    ],
)
def test_meaningless_options_are_refused_with_their_value(options, told):
    with pytest.raises(ValueError, match=told):
        Options(**{"shape": SMALL, **options})


def test_options_survive_json():
    options = Options(
        SMALL, 4, "100mbit", ("flash",), ("dtensor",), "train", "float64", 2, "best", "ring", True, 2, "50mbit"
    )
    assert Options.from_json(options.to_json()) == options


def test_candidates_of_each_mode():
    rows = [(c.row, c.overlap and c.overlap.slices, c.overlap and c.overlap.splits) for c in candidates(
        Options(SMALL, modes=("flash", "slice", "auto", "collective"), peers=("dtensor",), splits="best")
    )]  # fmt: skip
    assert rows == [
        ("compute", None, None), ("off", None, None),
        ("flash", None, 1), ("flash", None, 2), ("flash", None, 4), ("flash", None, 8),
        ("slice", 2, None), ("slice", 4, None), ("slice", 8, None),
        ("auto", None, None), ("collective", None, None), ("dtensor", None, None),
    ]  # fmt: skip


@pytest.mark.parametrize(("train", "moves"), [(False, 2), (True, 5)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ideal_bytes_of_even_parts(ranks, train, moves):
    options = Options(SMALL, ranks, phase="train" if train else "forward", dtype="bfloat16")
    assert options.ideal_bytes == moves * 64 * (ranks - 1) // ranks * 16 * 2


def test_ideal_bytes_of_uneven_parts_are_those_of_the_busiest_rank():
    assert MlpShape(5, 1, 1).ideal_elements(2, False) == 3 + 2  # rank 0 sends its 3 rows and 2 partial sums


# --- the arithmetic


def part(row, seconds, *, blocked=(), cpu=0.0, sent=None, error=1e-7, complaint="", note="", detail="", said=()):
    made = Part(row, detail, note, list(seconds), [cpu] * len(seconds), list(blocked), sent, error, complaint)
    for predicted_s, in_calls_s in said:
        made.predicted_s.append(predicted_s)
        made.in_calls_s.append(in_calls_s)
    return made


def test_rows_follow_the_definitions():
    ranks = [
        [
            part("compute", [1.0, 1.0, 1.2], cpu=0.1),
            part("off", [2.0, 2.0, 2.4], blocked=[0.5, 0.7, 0.6], sent=10),
            part("slice", [1.5, 1.6, 1.7], detail="sliced x2", note="best of 2, 4"),
            part("slice", [1.4, 1.4, 1.4], detail="sliced x4", note="best of 2, 4"),
            part("flash", [1.1, 1.0, 1.3], cpu=0.3, blocked=[0.0, 0.1, 0.0], sent=10),
        ],
        [
            part("compute", [1.0, 1.1, 1.0], cpu=0.1),
            part("off", [2.1, 1.9, 2.0], blocked=[0.1, 0.1, 0.1], sent=12),
            part("slice", [1.5, 1.5, 1.5], detail="sliced x2", note="best of 2, 4"),
            part("slice", [1.4, 1.4, 1.5], detail="sliced x4", note="best of 2, 4"),
            part("flash", [1.0, 1.2, 1.1], cpu=0.2, blocked=[0.2, 0.2, 0.2], sent=12, error=3e-7),
        ],
    ]
    summary = summarize(ranks)
    rows = {row.mode: row for row in summary.rows}
    assert list(rows) == ["compute", "off", "slice", "flash"]
    off, flash = rows["off"], rows["flash"]
    # slowest rank a round: compute 1.0 1.1 1.2, off 2.1 2.0 2.4, flash 1.1 1.2 1.3
    assert (flash.seconds, flash.seconds_min, flash.seconds_max) == (1.2, 1.1, 1.3)
    assert off.exposed_seconds == pytest.approx(1.1)  # median of 1.1, 0.9, 1.2
    assert flash.exposed_seconds == pytest.approx(0.1)
    assert flash.blocked_seconds == 0.2
    assert flash.wire_cpu_seconds == pytest.approx(0.2)
    assert flash.communication_reduction == pytest.approx(1 - 0.1 / 1.1)
    assert flash.latency_reduction == pytest.approx(1 - 1.2 / 2.1)
    assert (flash.wire_bytes, flash.max_abs_error) == (12, 3e-7)
    assert rows["slice"].detail == "sliced x4 (best of 2, 4)"
    assert rows["slice"].blocked_seconds is None
    assert rows["compute"].communication_reduction is None
    assert summary.best == {"compute": 0, "off": 1, "slice": 3, "flash": 4}
    result = as_json(Options(SMALL, link="1gbit", dtype="float32"), summary.rows)
    assert result["bound_seconds"] == 1.1  # compute, since the wire would need less
    slow = as_json(Options(SMALL, link="10kbit", dtype="float32"), summary.rows)
    assert slow["bound_seconds"] == 2 * 32 * 16 * 4 / 1250
    assert table(result).row_count == 4
    assert "1000 Mbit/s" in title(result)


def test_what_plans_say_stands_beside_what_was_measured():
    def rank(compute, calls_s, *others):
        rows = zip(("off", "slice", "flash"), others, strict=True)
        return [
            part("compute", compute, said=[(None, calls_s)] * 3),
            *(part(row, [2.0] * 3, said=s) for row, s in rows),
        ]

    off, partly = [(3.0, 0.0), (1.0, 0.0), (2.0, 0.0)], [(1.0, 0.0), (None, 0.0), (1.0, 0.0)]
    ranks = [rank([1.0, 1.0, 1.0], 0.5, off, off, [(0.5, 0.0)] * 3), rank([1.5, 1.5, 1.5], 0.75, off, partly, off)]
    result = as_json(Options(SMALL), summarize(ranks).rows)
    # beside calls the slowest rank has 1.5 - 0.75 in the pass that moves nothing
    assert [row["predicted_seconds"] for row in result["rows"]] == [None, 2.75, None, 2.75]


def record(op, calls, seconds, predicted_s, exposed_s):
    return Record("site", op, "auto", "flash", "planned", "", "", calls, 0, 0.0, seconds, predicted_s, exposed_s)


def test_what_is_said_of_passes_in_a_row():
    calls = [record("mlp", 2, 4.0, 3.0, 1.0), record("mlp backward", 2, 6.0, 5.0, 1.0)]
    assert said(calls, passes=2, agreements=4, agreement_s=0.25) == (4.0 + 2 * 0.25, 5.0)
    steps = [record("step", 2, 9.0, 8.0, 3.0), record("grad_reduce_scatter", 2, 0.0, None, None)]
    assert said(steps, passes=2, agreements=4, agreement_s=0.25) == (1.5 + 2 * 0.25, 0.0)
    assert said([*calls, record("exchange", 2, 1.0, None, None)], 1, 0, 0.25) == (None, 11.0)
    assert said([], 1, 0, 0.25) == (None, 0.0)


@pytest.mark.parametrize("wrong", ["off", "flash"])
def test_wrong_values_get_no_timing(wrong):
    ranks = [
        [
            part("compute", [1.0]),
            *(part(row, [2.0], complaint="out differs" * (row == wrong)) for row in ("off", "flash")),
        ]
        for _ in range(2)
    ]
    ranks[1][1].max_abs_error = ranks[1][2].max_abs_error = 0.5
    summary = summarize(ranks)
    row = next(row for row in summary.rows if row.mode == wrong)
    assert (row.seconds, row.exposed_seconds, row.latency_reduction, row.max_abs_error) == (None, None, None, 0.5)
    assert len(summary.complaints) == 2
    assert wrong not in summary.best
    assert all(row.latency_reduction is None for row in summary.rows) == (wrong == "off")
    table(as_json(Options(SMALL), summary.rows))


# --- values


def test_values_are_compared_with_their_scale():
    right = {"out": torch.tensor([1.0, -200.0], dtype=torch.float64)}
    assert compare({"out": torch.tensor([1.0, -200.0])}, right, 1e-4) == (0.0, "")
    error, complaint = compare({"out": torch.tensor([1.01, -200.0])}, right, 1e-4)
    assert error == pytest.approx(0.01, rel=1e-4)
    assert complaint == ""
    assert "out differs by 0.03" in compare({"out": torch.tensor([1.03, -200.0])}, right, 1e-4)[1]


@pytest.mark.parametrize(
    "found",
    [{}, {"out": torch.ones(3)}, {"out": torch.tensor([1.0, math.nan])}, {"out": torch.tensor([math.inf, 2.0])}],
)
def test_missing_misshapen_and_infinite_values_are_wrong(found):
    assert compare(found, {"out": torch.tensor([1.0, 2.0], dtype=torch.float64)}, 1e-4)[1]


@pytest.mark.parametrize("gated", [False, True])
def test_the_reference_is_the_unsharded_module(gated):
    case = case_of(MlpShape(7, 6, 5, gated), torch.float64, 1, 2)
    tensors = {name: tensor.clone().requires_grad_() for name, tensor in case.full.items()}
    hidden = tensors["x"] @ tensors["up"].t()
    active = (
        torch.nn.functional.silu(tensors["x"] @ tensors["gate"].t()) * hidden
        if gated
        else torch.nn.functional.gelu(hidden)
    )
    out = active @ tensors["down"].t()
    out.backward(case._full_grad)
    expected = {
        "out": out[4:],
        "x": tensors["x"].grad[4:],
        "up": tensors["up"].grad[3:],
        "down": tensors["down"].grad[:, 3:],
    }
    if gated:
        expected["gate"] = tensors["gate"].grad[3:]
    found = case.reference(True)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def measured(options):
    """The parts of both ranks, as threads of this process."""
    barrier = threading.Barrier(options.ranks)
    return run_ranks(
        options.ranks, lambda rank, group: Bench(options, candidates(options), group, barrier.wait).run()
    )  # fmt: skip


@pytest.mark.parametrize("phase", ["forward", "train"])
def test_right_values_raise_no_complaint(phase):
    ranks = measured(Options(SMALL, link="none", phase=phase, repeats=1, modes=("flash",), dtype="bfloat16"))
    assert [part.complaint for parts in ranks for part in parts] == [""] * 6
    assert all(len(part.seconds) == 1 for parts in ranks for part in parts)


@pytest.mark.parametrize("only_small", [False, True])
def test_a_mode_with_wrong_values_is_seen(monkeypatch, only_small):
    right = Mlp.forward

    def wrong(self, group, overlap):
        out = right(self, group, overlap)
        spoilt = overlap.mode == "flash" and self.rank == 1 and (not only_small or self.shape.seq < 64)
        return out * 1.01 if spoilt else out

    monkeypatch.setattr(Mlp, "forward", wrong)
    ranks = measured(Options(SMALL, link="none", repeats=1, modes=("flash",)))
    told = {(rank, part.row) for rank, parts in enumerate(ranks) for part in parts if part.complaint}
    assert told == {(1, "flash")}
    assert ("float64" in ranks[1][2].complaint) is True


# --- whole runs


def check_result(result, modes):
    assert list(result) == [
        "schema", "case", "ranks", "link_bytes_per_s", "dtype", "pass", "shape", "bound_seconds", "rows",
    ]  # fmt: skip
    assert (result["schema"], result["case"], result["ranks"], result["dtype"]) == (1, "mlp", 2, "float32")
    assert result["shape"] == {"seq": 64, "hidden": 16, "ffn": 32, "gated": False}
    rows = {row["mode"]: row for row in result["rows"]}
    assert list(rows) == modes
    for mode, row in rows.items():
        assert set(row) == COLUMNS
        assert all(isinstance(row[name], float) for name in TIMES)
        assert row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
        assert (row["max_abs_error"] is None) == (mode == "compute")
        assert row["max_abs_error"] is None or row["max_abs_error"] < 1e-4
        off = rows["off"]
        assert row["latency_reduction"] == pytest.approx(1 - row["seconds"] / off["seconds"])
        if mode != "compute" and off["exposed_seconds"] > 0:
            assert row["communication_reduction"] == pytest.approx(1 - row["exposed_seconds"] / off["exposed_seconds"])
    assert rows["compute"]["exposed_seconds"] == 0
    return rows


def test_forward_with_all_modes_a_peer_and_a_trace():
    modes = ("collective", "slice", "flash", "auto")
    peers = ("dtensor",) if missing("megatron") else ("dtensor", "megatron")
    outcome = run(Options(SMALL, 2, "none", modes, peers, repeats=2, splits="best", trace=True), timeout_s=60)
    assert outcome.complaints == []
    rows = check_result(json.loads(json.dumps(outcome.result)), ["compute", "off", *modes, *peers])
    ideal = 2 * 32 * 16 * 4
    taken = None if rows["auto"]["detail"].startswith("collective") else ideal
    assert {mode: row["wire_bytes"] for mode, row in rows.items()} == {
        "compute": 0, "off": ideal, "slice": ideal, "flash": ideal, "auto": taken, "collective": None,
        **dict.fromkeys(peers),
    }  # fmt: skip
    planned = {mode for mode, row in rows.items() if row["predicted_seconds"] is not None}
    assert planned == {"off", *modes}
    assert rows["slice"]["detail"].endswith("(best of 2, 4, 8)")
    assert rows["flash"]["detail"].endswith("(best of 1, 2, 4, 8)")
    assert rows["dtensor"]["blocked_seconds"] is None
    assert outcome.result["bound_seconds"] is None
    assert outcome.trace is not None
    assert {(span.rank, span.track) for span in outcome.trace.spans} >= {
        (rank, track) for rank in range(2) for track in ("compute", "send", "recv")
    }


@pytest.mark.skipif(lab_unavailable() is not None, reason="no lab on this machine")
def test_train_on_a_link():
    outcome = run(Options(SMALL, 2, "100mbit", ("flash",), ("dtensor",), "train", repeats=2), timeout_s=60)
    assert outcome.complaints == []
    rows = check_result(outcome.result, ["compute", "off", "flash", "dtensor"])
    ideal = 5 * 32 * 16 * 4
    assert rows["flash"]["wire_bytes"] == rows["off"]["wire_bytes"] == ideal
    assert outcome.result["link_bytes_per_s"] == 12_500_000
    assert outcome.result["bound_seconds"] == max(rows["compute"]["seconds"], ideal / 12_500_000)


@pytest.mark.skipif(lab_unavailable() is not None, reason="no lab on this machine")
def test_nodes_are_calibrated(tmp_path, monkeypatch):
    """What crosses the uplink of a node takes its time, and the machine of the plans knows of the nodes; it is no
    user's machine, and not kept."""
    monkeypatch.setenv("HOME", str(tmp_path))
    options = Options(MlpShape(256, 128, 256), 4, "200mbit", ("auto",), repeats=2, nodes=2, uplink="50mbit")
    assert options.ranks_of_nodes == (2, 2)
    outcome = run(options, timeout_s=120)
    assert outcome.complaints == []
    assert (outcome.result["nodes"], outcome.result["uplink_bytes_per_s"]) == ((2, 2), 6_250_000)
    rows = {row["mode"]: row for row in outcome.result["rows"]}
    assert rows["auto"]["seconds"] > 0
    assert not list(tmp_path.rglob("machine-*.json"))
    machine = outcome.machine
    assert machine.nodes == (2, 2)
    assert machine.uplink.bytes_per_s < 0.5 * machine.link.bytes_per_s
