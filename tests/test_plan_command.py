"""``flashoverlap plan``: what it prints, writes and refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from flashoverlap.cli import app
from flashoverlap.machine import Link, Machine
from flashoverlap.machine_file import write
from flashoverlap.matmul import Matmul

STEP = ["--model", "llama-3.2-1b", "--machine", "h100-nvlink"]
OP = ["--op", "mlp", "--tokens", "4096", "--hidden", "1024", "--ffn", "4096", "--ranks", "2"]


def call(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def asked(tmp_path, *arguments):
    """What is printed, and what is written."""
    result = call(*arguments, "--json", tmp_path / "plan.json")
    assert result.exit_code == 0, result.output
    return result.output, json.loads((tmp_path / "plan.json").read_text())


def test_a_model_on_a_cluster(tmp_path):
    split = ["--tp", 4, "--up", 2, "--dp", 8]
    told, written = asked(tmp_path, *STEP, *split, "--seq", 8192, "--batch", 1, "--shard", "gradients")
    for site in ("qkv", "attention", "mlp", "head", "gradients", "weights"):
        assert f"\n{site}" in told
    for word in ("MFU", "communication hidden", "memory:", "data sheet", "contention 0.05"):
        assert word in told
    assert written["split"] == {"dp": 8, "up": 2, "tp": 4}
    assert written["tokens"] == 8 * 8192
    assert (written["fits"], written["shard"], written["dtype"]) == (True, "gradients", "bfloat16")
    assert f"MFU {written['mfu']:.1%}" in told
    for each in written["operators"]:
        assert max(each["compute_s"], 0.0) <= each["bound_s"] <= each["seconds"] * (1 + 1e-9), each["site"]
    mlp = next(each for each in written["operators"] if each["site"] == "mlp")
    assert mlp["bound_s"] > 0
    row = next(line for line in told.splitlines() if line.startswith("mlp "))
    assert row.split()[-5:-2] == [f"{mlp[name] * 1e3:.3f}" for name in ("seconds", "bound_s", "compute_s")]
    assert "bound" in told
    assert {"site", "mode", "seconds", "exposed_s", "bytes"} <= written["operators"][0].keys()


def test_a_model_from_its_configuration_on_a_calibrated_machine(tmp_path):
    sizes = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    write(tmp_path / "machine.json", Machine(Link(1e-4, 1e8), matmul=Matmul(1e11)), {})
    told, written = asked(
        tmp_path,
        "--model",
        tmp_path,
        "--machine",
        tmp_path / "machine.json",
        "--tp",
        2,
        "--seq",
        512,
        "--accumulate",
        3,
    )
    assert "figures: measured" in told
    assert (written["dtype"], written["fits"], written["assumed"], written["tokens"]) == ("float32", None, None, 1536)
    told, written = asked(
        tmp_path, "--model", tmp_path, "--machine", tmp_path / "machine.json", "--memory", 1, "--dtype", "bf16"
    )
    assert (written["dtype"], written["fits"]) == ("bfloat16", True)


def test_a_calibrated_machine_says_where_it_was_measured_and_in_what(tmp_path):
    machine, file = Machine(Link(1e-4, 1e8), matmul=Matmul(1e11)), tmp_path / "machine.json"
    write(file, machine, {"host": "node-7", "dtype": "bfloat16", "ranks": 2})
    told, written = asked(tmp_path, *OP, "--machine", file)
    assert f"figures: measured, {file}: host node-7, dtype bfloat16\n" in told
    same, _ = asked(tmp_path, *OP, "--machine", file, "--dtype", "bf16")
    assert same == told
    told, other = asked(tmp_path, *OP, "--machine", file, "--dtype", "fp32")
    assert "dtype bfloat16; planned in float32 all the same, with matmuls as fast as in bfloat16\n" in told
    assert other["source"] in told
    assert other["wire_s"] == 2 * written["wire_s"]
    write(file, machine, {})
    assert "host not said, dtype not said\n" in asked(tmp_path, *OP, "--machine", file)[0]
    write(file, machine, {"dtype": "float64"})
    refused = call(*OP, "--machine", file)
    assert (refused.exit_code, len(refused.output.splitlines())) == (2, 1)
    assert "machine.json was measured in 'float64'; --dtype must say in which" in refused.output


def test_what_does_not_fit_is_told():
    assert "DOES NOT FIT" in call("--model", "llama-3-70b", "--machine", "h100-nvlink").output


def test_a_sweep(tmp_path):
    told, written = asked(tmp_path, *STEP, "--sweep", "--devices", 64, "--seq", 2048, "--global-batch", 64)
    rates = [each["tokens_per_s"] for each in written["splits"]]
    assert rates == sorted(rates, reverse=True)
    assert len(written["splits"]) + len(written["misfits"]) == 28
    assert "heads: 64 ranks share 32 heads" in told


def test_one_operator(tmp_path):
    told, written = asked(tmp_path, *OP, "--machine", "cpu-10gbe", "--dtype", "fp32")
    for word in ("taken: ", "runner-up: ", "bound: ", written["reason"]):
        assert word in told
    seconds = [each["seconds"] for each in written["candidates"]]
    assert seconds[1:] == sorted(seconds[1:])
    assert written["predicted_s"] == seconds[0] >= written["bound_s"]
    assert {each["mode"] for each in written["candidates"]} >= {"off", "collective", "flash"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["all_gather_linear", "--ffn", 512],
        ["linear_reduce_scatter backward", "--ffn", 512],
        ["linear_all_reduce", "--ffn", 512],
        ["attention_reduce_scatter"],
        ["linear_all_to_all", "--ffn", 512],
        ["all_to_all_linear", "--ffn", 512],
        ["attention_all_to_all_linear backward"],
    ],
)
def test_every_operator(tmp_path, arguments):
    _, written = asked(
        tmp_path, "--op", *arguments, "--tokens", 2048, "--hidden", 512, "--ranks", 4, "--machine", "a100-pcie"
    )
    assert written["op"] == arguments[0]
    assert written["compute_s"] > 0
    assert written["wire_s"] > 0


def test_the_paper(tmp_path):
    told, written = asked(tmp_path, "--paper")
    assert [row["mode"] for row in written["rows"]] == ["vanilla", "slice", "flash"]
    keys = {"mode", "communication_ms", "latency_ms", "communication_reduction", "latency_reduction"}
    assert all(keys <= row.keys() for row in written["rows"])
    assert "in: 43.8 ms of communication" in told
    assert "out: 7 slices come nearest to 84%" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "one of --model, --op and --paper is needed"),
        (["--paper", "--op", "mlp"], "not --op and --paper"),
        (["--paper", "--tp", 2], "--tp 2: means nothing beside --paper"),
        ([*STEP, "--devices", 8], "--devices 8: means nothing beside --model"),
        ([*STEP, "--sweep"], "--sweep needs --devices"),
        ([*STEP, "--sweep", "--devices", 8, "--tp", 2], "--tp 2: means nothing beside --sweep"),
        (["--model", "llama-3-8b"], "--model needs --machine"),
        (["--model", "llama-9", "--machine", "mi300x"], "'llama-9'; models: "),
        (["--model", "llama-3-8b", "--machine", "h1000"], "'h1000'; machines: "),
        ([*STEP, "--tp", 0], "--tp 0: at least 1"),
        ([*STEP, "--tp", 64], "64 ranks share 32 heads"),
        ([*STEP, "--seq", "long"], "'long' is not a whole number"),
        ([*STEP, "--dtype", "int8"], "--dtype int8: unknown"),
        ([*STEP, "--shard", "all"], "--shard all: unknown"),
        (["--model", "llama-3-8b", "--machine", "ascend-910b", "--dtype", "fp32"], "no published figure for float32"),
        ([*OP, "--machine", "mi300x", "--seq", 5], "--seq 5: means nothing beside --op"),
        (["--op", "cake", *OP[2:], "--machine", "mi300x"], "--op cake: unknown"),
        ([*OP[:-1], 3, "--machine", "mi300x"], "--ffn 4096: does not divide by 3 ranks"),
        ([*OP[:6], "--ranks", 2, "--machine", "mi300x"], "--op mlp needs --ffn"),
        (["--op", "attention_reduce_scatter", *OP[2:], "--machine", "mi300x"], "--ffn 4096: means nothing"),
        (["--paper", "--json", "/no/such/place/p.json"], "/no/such/place"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(arguments, told):
    result = call(*arguments)
    assert result.exit_code == 2
    assert told in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [("{}", "it is none of a machine"), ("[" * 200_000, "nested too deeply")],
    ids=["another", "deep"],
)
def test_a_file_that_holds_nothing_of_use_is_told(tmp_path, text, told):
    (tmp_path / "some.json").write_text(text)
    result = call(*STEP[:2], "--machine", tmp_path / "some.json")
    assert (result.exit_code, len(result.output.splitlines())) == (2, 1)
    assert told in result.output
    result = call("--model", tmp_path / "some.json", *STEP[2:])
    assert (result.exit_code, len(result.output.splitlines())) == (2, 1)
    assert "some.json" in result.output


def test_planning_loads_neither_torch_nor_transformers():
    code = (
        "import sys; from flashoverlap.cli import app\n"
        "try: app(['plan', '--model', 'llama-3.2-1b', '--machine', 'mi300x', '--tp', '2'])\n"
        "except SystemExit as done: sys.exit(done.code or bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
