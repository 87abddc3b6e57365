"""The paper's MLP table: what goes in, and what must come out of the simulator."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flashoverlap.cluster.paper import Setting, machine_of, reproduce
from flashoverlap.patterns import mlp
from flashoverlap.simulate import simulate

FOUND = reproduce()
ROWS = {row.mode: row for row in FOUND.rows}


def test_what_was_put_in_is_there():
    vanilla = ROWS["vanilla"]
    assert vanilla.communication_ms == pytest.approx(43.8)
    assert vanilla.communication_ms / vanilla.latency_ms == pytest.approx(0.369)
    assert (vanilla.communication_reduction, vanilla.latency_reduction) == (0, 0)


def test_the_paper_s_rows_come_out():
    assert ROWS["slice"].communication_reduction == pytest.approx(0.84, abs=0.01)
    assert ROWS["slice"].latency_reduction == pytest.approx(0.314, abs=0.01)
    assert ROWS["flash"].communication_reduction == pytest.approx(0.998, abs=0.002)
    assert ROWS["flash"].latency_reduction == pytest.approx(0.369, abs=0.002)
    for rows in FOUND.trend.values():
        assert 0.35 < rows[-1].latency_reduction < 0.40


def test_rows_agree_with_themselves():
    for row in ROWS.values():
        hidden_ms = 43.8 - row.communication_ms
        assert row.communication_reduction == pytest.approx(hidden_ms / 43.8)
        assert row.latency_reduction == pytest.approx(hidden_ms / ROWS["vanilla"].latency_ms)
    assert FOUND.trend[4096] == FOUND.rows


def test_rows_are_those_of_the_simulator():
    """What flash leaves exposed is the launches of its program, and no more."""
    rows, width = [32 * 4096 // 4] * 4, {"x": 8192, "p": 8192}
    trace = simulate(mlp(rows, row_bytes=width), FOUND.machine)
    assert ROWS["flash"].latency_ms == pytest.approx(trace.makespan_s * 1e3)
    free = simulate(mlp(rows, row_bytes=width), replace(FOUND.machine, issue_s=0.0))
    assert ROWS["flash"].communication_ms == pytest.approx((trace.makespan_s - free.makespan_s) * 1e3, abs=0.02)


def test_the_number_of_slices_is_the_nearest():
    nearest = min(FOUND.slice_counts, key=lambda count: abs(FOUND.slice_counts[count] - 0.84))
    assert FOUND.slices == nearest
    assert ROWS["slice"].communication_reduction == FOUND.slice_counts[nearest]


def test_other_figures_give_other_rows():
    slow = reproduce(Setting(communication_s=90e-3, hidden_reduction=0.6), seqs=())  # more wire than matmuls
    assert slow.rows[-1].communication_reduction < 0.7
    assert slow.trend == {}


def test_figures_that_leave_no_time_are_refused():
    with pytest.raises(ValueError, match="for bytes"):
        machine_of(Setting(communication_s=1e-5))


def test_json_has_inputs_and_outputs():
    written = FOUND.as_json()
    assert [row["mode"] for row in written["rows"]] == ["vanilla", "slice", "flash"]
    assert written["inputs"]["communication_s"] == 43.8e-3
    assert written["derived"]["slices"] == FOUND.slices


def test_the_example_prints_the_rows():
    example = Path(__file__).parents[1] / "examples" / "paper_mlp.py"
    out = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=True).stdout
    for row in FOUND.rows:
        assert f"{row.mode:8} {row.communication_ms:10.2f} {row.latency_ms:10.1f}" in out
