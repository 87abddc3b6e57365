"""bench's command line: what it hands on, several sizes in one run, and what it refuses."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import flashoverlap.bench.run as bench_run
from flashoverlap.bench.run import Outcome
from flashoverlap.bench.shapes import SHAPES, LlmShape, StackShape
from flashoverlap.bench.summary import Part, as_json, summarize
from flashoverlap.cli import app

KEYS = ["schema", "case", "ranks", "link_bytes_per_s", "dtype", "pass", "shape", "bound_seconds", "rows"]


def call(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.fixture
def seen(monkeypatch):
    """The options of each run, which has numbers in place of ranks."""
    found = []

    def run(options):
        found.append(options)
        rows = [
            Part(row, "", "", [seconds], [0.0], [0.0], 8, 1e-7) for row, seconds in (("compute", 1.0), ("off", 2.0))
        ]
        summary = summarize([rows] * 2)
        return Outcome(as_json(options, summary.rows), summary.complaints, [], None)

    monkeypatch.setattr(bench_run, "run", run)
    return found


@pytest.mark.parametrize("case", ["mlp", "attention", "ulysses", "block", "model", "dp"])
def test_defaults_are_those_of_the_shape_and_all_files_have_the_same_keys(seen, tmp_path, case):
    result = call(case, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    (options,) = seen
    assert options.shape == SHAPES[case]()
    assert (options.ranks, options.link, options.phase) == (2, "1gbit", "train" if case == "dp" else "forward")
    written = json.loads((tmp_path / "r.json").read_text())
    assert list(written) == KEYS
    assert written["case"] == case


def test_a_size_with_several_values_is_run_once_for_each(seen, tmp_path):
    arguments = ("attention", "--seq", "1024,2048", "--heads", 8, "--kv-heads", 8, "--causal", "--compare", "row")
    result = call(*arguments, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    assert [(each.shape.seq, each.shape.heads, each.shape.causal) for each in seen] == [
        (1024, 8, True),
        (2048, 8, True),
    ]
    assert "attention, by seq" in result.output
    written = json.loads((tmp_path / "r.json").read_text())
    assert (list(written), written["swept"]) == (["schema", "swept", "results"], "seq")
    assert [list(each) for each in written["results"]] == [KEYS] * 2


def test_nodes_are_handed_on(seen):
    assert call("mlp", "--ranks", 4, "--nodes", 2, "--uplink", "100mbit").exit_code == 0
    (options,) = seen
    assert (options.nodes, options.uplink, options.lab().nodes) == (2, "100mbit", 2)
    refused = call("mlp", "--nodes", 2)
    assert (refused.exit_code, len(seen)) == (2, 1)
    assert "nodes 2 need a link and an uplink with a rate" in refused.output


def test_each_case_of_dp_has_sizes_of_its_own(seen):
    assert call("dp", "--case", "llm", "--shard", "none", "--ffn", 1024).exit_code == 0
    assert call("dp", "--layers", 3).exit_code == 0
    assert [each.shape for each in seen] == [LlmShape(shard="none", ffn=1024), StackShape(layers=3)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["dp", "--heads", 8], "--heads 8: means nothing with this --case"),
        (["dp", "--case", "cake"], "--case cake: unknown; known: stack, llm"),
        (["dp", "--shard", "half"], "--shard half"),
        (["dp", "--pass", "forward"], "--pass"),
        (["attention", "--compare", "column"], "--compare column"),
        (["attention", "--seq", "1024,x"], "'x' is not a whole number"),
        (["attention", "--seq", "1024,2048", "--heads", "8,16"], "--seq and --heads: one size at a time"),
        (["attention", "--seq", "1024,2048", "--trace", "t.json"], "--trace draws one run, and --seq has several"),
        (["attention", "--seq", "1024,0"], "--seq 0: at least 1"),
        (["ulysses", "--seq", 4097], "--seq 4097"),
        (["ulysses", "--peers", "ddp"], "--peers ddp can run bench dp"),
    ],
)
def test_bad_arguments_are_one_line_with_the_value_and_status_2(arguments, told):
    result = call(*arguments)
    assert result.exit_code == 2
    assert told in result.output
    assert len(result.output.splitlines()) == 1
