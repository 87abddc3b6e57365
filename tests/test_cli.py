"""The command line: what it prints, what it refuses, and with which exit status."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import flashoverlap.bench.run as bench_run
from flashoverlap.bench.run import Outcome
from flashoverlap.bench.summary import Part, as_json, summarize
from flashoverlap.cli import app
from flashoverlap.lab import LabError, lab_unavailable
from flashoverlap.trace import Span, Trace

ONE = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"


def call(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_the_command_line_does_not_load_torch():
    code = "import sys, flashoverlap.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "flashoverlap", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("flashoverlap ")


@pytest.mark.parametrize("arguments", [["--help"], ["lab", "--help"], ["bench", "-h"], ["bench", "mlp", "--help"]])
def test_help(arguments):
    result = call(*arguments)
    assert result.exit_code == 0
    assert "--help" in result.output


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_no_command_shows_the_help(arguments):
    result = call(*arguments)
    assert result.exit_code == 2
    assert len(result.output.splitlines()) > 5


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["bench", "mlp", "--modes", "off,fast"], "fast"),
        (["bench", "mlp", "--peers", "horovod"], "horovod"),
        (["bench", "mlp", "--dtype", "int8"], "int8"),
        (["bench", "mlp", "--pass", "sideways"], "sideways"),
        (["bench", "mlp", "--link", "fast"], "fast"),
        (["bench", "mlp", "--ranks", "0"], "0"),
        (["bench", "mlp", "--ranks", "two"], "two"),
        (["bench", "mlp", "--seq", "0"], "--seq 0"),
        (["bench", "mlp", "--repeats", "-3"], "-3"),
        (["bench", "mlp", "--json", "/no/such/place/r.json"], "/no/such/place"),
        (["bench", "mlp", "--speed", "9"], "--speed"),
        (["bench", "cake"], "cake"),
        (["cake"], "cake"),
        (["lab", "--ranks", "0", "--", "true"], "0"),
        (["lab", "--link", "fast", "--", "true"], "fast"),
        (["lab", "--link", "none", "--", "no-such-command"], "no-such-command"),
        (["lab", "--link", "none"], "COMMAND"),
    ],
)
def test_bad_arguments_are_one_line_with_the_value_and_status_2(arguments, told):
    result = call(*arguments)
    assert result.exit_code == 2
    assert told in result.output
    assert len(result.output.splitlines()) == 1
    assert result.output.startswith(("flashoverlap", "root"))  # the runner calls the program root


def test_lab_runs_a_command_once_per_rank():
    result = call("lab", "--ranks", 2, "--link", "none", "--", sys.executable, "-c", ONE)
    assert result.exit_code == 0
    assert sorted(result.output.splitlines()) == ["[rank 0] rank 0 of 2", "[rank 1] rank 1 of 2"]


def test_lab_ends_with_the_status_of_the_command():
    result = call("lab", "--ranks", 2, "--link", "none", "--", sys.executable, "-c", "import sys; sys.exit(7)")
    assert result.exit_code == 7
    assert "Traceback" not in result.output


@pytest.mark.skipif(lab_unavailable() is not None, reason="no lab on this machine")
def test_lab_with_a_link():
    result = call("lab", "--ranks", 2, "--link", "100mbit", "--", sys.executable, "-c", ONE)
    assert result.exit_code == 0
    assert len(result.output.splitlines()) == 2


# --- bench, with the ranks replaced by numbers


def outcome(options, complaint=""):
    def part(row, seconds):
        return Part(row, "", "", [seconds], [0.0], [0.0], 8, 1e-7, complaint if row == "flash" else "")

    summary = summarize([[part("compute", 1.0), part("off", 2.0), part("flash", 1.1)]] * 2)
    trace = Trace.of([Span(0, "compute", "y0=mm(x0)", 0.0, 1.0)], 2) if options.trace else None
    return Outcome(as_json(options, summary.rows), summary.complaints, ["peer: a note [with brackets]"], trace)


def test_bench_prints_a_table_and_writes_its_files(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(bench_run, "run", lambda options: seen.append(options) or outcome(options))
    result = call(
        "bench", "mlp", "--json", tmp_path / "r.json", "--trace", tmp_path / "t.json", "--modes", "flash, off",
        "--gated", "--splits", 3, "--pass", "train",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "flash" in result.output
    assert "a note [with brackets]" in result.output
    (options,) = seen
    assert (options.modes, options.splits, options.phase) == (("flash", "off"), "3", "train")
    assert (options.shape.gated, options.shape.activation) == (True, "silu")
    written = json.loads((tmp_path / "r.json").read_text())
    assert written == outcome(options).result
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_wrong_values_are_status_1_and_get_no_timing(monkeypatch):
    monkeypatch.setattr(bench_run, "run", lambda options: outcome(options, "out differs by 3"))
    result = call("bench", "mlp")
    assert result.exit_code == 1
    assert "out differs by 3" in result.output
    assert "1.1000" not in result.output


def test_a_failed_rank_is_status_1(monkeypatch):
    def fail(options):
        raise LabError("rank 1 of 2 failed with exit code 3", rank=1, exit_code=3)

    monkeypatch.setattr(bench_run, "run", fail)
    result = call("bench", "mlp")
    assert result.exit_code == 1
    assert "rank 1 of 2 failed" in result.output
