"""Training: what is refused, steps that depend on nothing but their number, checkpoints that survive a kill, modes
that learn the same."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from flashoverlap.checkpoint_folder import KEPT, CheckpointFolder
from flashoverlap.cli import app
from flashoverlap.lab import lab_unavailable
from flashoverlap.overlap import Overlap
from flashoverlap.train.configuration import difference, fields_of, read_configuration
from flashoverlap.train.degrees import Degrees
from flashoverlap.train.flops import flops_per_token
from flashoverlap.train.learning_rate import learning_rate
from flashoverlap.train.metrics import Metrics
from flashoverlap.train.model import build, without_memory
from flashoverlap.train.options import Options
from flashoverlap.train.preflight import check, check_model
from flashoverlap.train.result import ModeResult, Scale, as_json, largest_difference
from flashoverlap.train.step import ADAMW, Training
from flashoverlap.train.text import Text

TINY = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 64,
}  # fmt: skip
METRICS = {
    "step", "mode", "loss", "grad_norm", "lr", "step_seconds", "tokens_per_s", "mfu", "exposed_seconds",
    "blocked_seconds",
}  # fmt: skip
MODE = [
    "mode", "losses", "step_seconds", "tokens_per_s", "mfu", "exposed_seconds", "blocked_seconds", "peak_bytes",
]  # fmt: skip
STEPS, EVERY = 24, 4


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny model's configuration and a text."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "tiny.json").write_text(json.dumps(TINY))
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. Ĝis morgaŭ! " * 50)
    return folder


def tiny(place, **chosen):
    return Options(**{"model": str(place / "tiny.json"), "data": place / "text.txt", "seq": 32, **chosen})


# --- options


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"steps": 0}, "--steps 0"),
        ({"seq": 1}, "--seq 1"),
        ({"batch": 0}, "--batch 0"),
        ({"accumulate": -1}, "--accumulate -1"),
        ({"lr": 0.0}, "--lr 0"),
        ({"lr": math.nan}, "--lr nan"),
        ({"clip": -1.0}, "--clip -1"),
        ({"warmup": -1}, "--warmup -1"),
        ({"dtype": "fp16"}, "--dtype fp16"),
        ({"overlap": "fast"}, "--overlap fast"),
        ({"overlap": "off", "splits": 2}, "--splits 2"),
        ({"slices": 2}, "--slices 2"),
        ({"compare": True, "overlap": "off"}, "--overlap off"),
        ({"compare": True, "resume": True, "out": Path("o")}, "--resume"),
        ({"compare": True, "checkpoint_every": 5}, "--checkpoint-every 5"),
        ({"checkpoint_every": 5}, "--checkpoint-every 5"),
        ({"resume": True}, "--out"),
        ({"json": Path("x"), "trace": Path("x")}, "both name x"),
        ({"up": 0}, "--up 0"),
        ({"dp": 3}, "--batch 2: cannot be spread evenly over --dp 3"),
        ({"shard": "gradients"}, "--shard gradients"),
        ({"dp": 2, "shard": "all"}, "--shard all: unknown"),
        ({"attention": "ulysses"}, "--attention ulysses: does not go with --up 1"),
        ({"up": 2, "attention": "query_split"}, "--attention query_split: does not go with --up 2"),
        ({"attention": "split"}, "--attention split: unknown; known: query_split, model, ulysses"),
    ],
)
def test_meaningless_options_are_refused_with_their_value(options, told):
    with pytest.raises(ValueError, match=told):
        Options(**options)


def test_the_mode_is_the_library_s_default_unless_given():
    assert (Options().mode, Options().how()) == ("auto", Overlap())
    assert Options(compare=True).how() == Overlap("flash")


def test_options_survive_the_command_line():
    options = Options(
        7, "m.json", Path("a b"), Path("o"), True, "slice", 2, "gradients", 2, 3, "ulysses", None, 3, False, 2, 64, 3, 5e-4, 0,
        0.5, "bf16", True, 4, -0, Path("j"), Path("t"), "/dev/tty9",
    )  # fmt: skip
    import typer

    from flashoverlap.train.options import taking_options

    seen = []
    program = typer.Typer()
    program.command()(taking_options(lambda **chosen: seen.append(Options(**chosen))))
    result = CliRunner().invoke(program, options.arguments())
    assert result.exit_code == 0, result.output
    assert seen == [options]


@pytest.mark.parametrize(
    ("given", "ranks", "degrees"),
    [
        ({}, 4, (1, 1, 4)),
        ({"up": 2}, 4, (1, 2, 2)),
        ({"dp": 2}, 4, (2, 1, 2)),
        ({"dp": 2, "up": 2, "tp": 2}, 8, (2, 2, 2)),
        ({"tp": 1}, 1, (1, 1, 1)),
    ],
)
def test_degrees_make_up_the_ranks(given, ranks, degrees):
    assert Options(**given).degrees(ranks) == Degrees(*degrees)
    assert Options(**given).degrees(ranks).count == ranks


def test_ranks_that_degrees_do_not_make_up():
    with pytest.raises(ValueError, match="--dp 2 x --up 2 do not make up the 6 ranks"):
        Options(dp=2, up=2).degrees(6)
    with pytest.raises(ValueError, match="--dp 1 x --up 2 x --tp 2 do not make up the 2 ranks"):
        Options(up=2, tp=2).degrees(2)
    assert [Options(**each).least_ranks for each in ({}, {"up": 2, "tp": 2}, {"dp": 2}, {"tp": 1})] == [2, 4, 2, 1]
    assert str(Degrees(1, 2, 2)) == "up 2 x tp 2"


# --- refused before anything starts


def config(place, name, **changed):
    file = place / f"{name}.json"
    file.write_text(json.dumps({**TINY, **changed}))
    return file


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--data", "nowhere"], "--data nowhere: no such file or folder"),
        (["--data", "empty"], "no text in the folder"),
        (["--data", "latin1.txt"], "not UTF-8 (byte 3)"),
        (["--data", "short.txt", "--batch", "3"], "short.txt has 40 tokens (bytes); one step takes 96"),
        (["--model", "nowhere.json"], "nowhere.json"),
        (["--model", "text.txt"], "not a JSON file"),
        (["--model", "bert.json"], "'bert' is unknown; known: llama"),
        (["--model", "narrow.json"], "a vocabulary of 255 does not hold the 256 byte values"),
        (["--seq", "128"], "--seq 128: the model tiny.json has 64 positions"),
        (["--out", "full"], "the folder is not empty"),
        (["--out", "full", "--resume"], "no training run is there to resume"),
        (["--out", "new", "--resume"], "no such folder"),
        (["--out", "text.txt"], "a folder is needed"),
        (["--json", "no/such.json"], "there is no directory no"),
        (["--ranks", "0"], "0"),
        (["--link", "fast"], "'fast'"),
        (["--ranks", "3", "--up", "2"], "--dp 1 x --up 2 do not make up the 3 ranks"),
        (["--steps", "many"], "'many' is not a whole number"),
        (["--lr", "high"], "'high' is not a number"),
    ],
)
def test_one_line_status_2_and_nothing_written(place, monkeypatch, arguments, told):
    monkeypatch.chdir(place)
    config(place, "bert", model_type="bert")
    config(place, "narrow", vocab_size=255)
    (place / "short.txt").write_text("s" * 40)
    (place / "latin1.txt").write_bytes("caf\xe9".encode("latin1"))
    (place / "empty").mkdir(exist_ok=True)
    (place / "full").mkdir(exist_ok=True)
    (place / "full" / "other.txt").write_text("somebody else's")
    before = sorted(place.rglob("*"))
    defaults = {"--data": "text.txt", "--model": "tiny.json", "--seq": "32", "--out": "new"}
    given = [word for name, value in defaults.items() if name not in arguments for word in (name, value)]
    result = CliRunner().invoke(app, ["train", *given, *arguments])
    assert result.exit_code == 2, result.output
    assert told in result.output
    assert len(result.output.splitlines()) == 1
    assert result.output.startswith(("flashoverlap train", "root train"))  # the runner calls the program root
    assert sorted(place.rglob("*")) == before


def test_the_extra_is_named_where_transformers_is_missing(place, monkeypatch):
    monkeypatch.setattr("flashoverlap.train.preflight.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install 'flashoverlap\[train\]'"):
        check(tiny(place))


def test_another_model_is_told_from_the_checkpoint_s(place):
    theirs = fields_of(read_configuration(str(place / "tiny.json")))
    assert difference(theirs, theirs) is None
    other = fields_of(read_configuration(str(config(place, "other", num_hidden_layers=3))))
    assert "num_hidden_layers is 2 there and 3 here" in difference(other, theirs)


# --- text


def test_batches_depend_on_the_step_s_number_alone():
    text = Text("", bytes(range(200)) * 3)
    one = list(text.step(7, 2, 3, 16, seed=1))
    assert [batch.shape for batch in one] == [(3, 16)] * 2
    assert all((np.diff(batch) % 200 == 1).all() for batch in one)
    again, other, reseeded = (
        list(text.step(*at, seed=seed)) for at, seed in (((7, 2, 3, 16), 1), ((8, 2, 3, 16), 1), ((7, 2, 3, 16), 2))
    )
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert not np.array_equal(one, reseeded)
    assert np.array_equal(np.concatenate(one), next(iter(text.step(7, 1, 6, 16, seed=1))))
    assert next(iter(Text("", b"abc").step(0, 1, 1, 3, 0))).tolist() == [[97, 98, 99]]


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    for name, content in (("b/x.md", "2"), ("a.txt", "1"), (".git/config", "no"), ("c.txt", "3")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert Text.read(tmp_path).content == b"1\n2\n3"


def test_the_default_text_is_long_and_utf_8():
    text = Text.read(None)
    assert len(text.content) > 1_000_000
    text.content.decode()


# --- arithmetic


def test_the_learning_rate_climbs_and_falls():
    rates = [learning_rate(step, 1.0, 4, 24) for step in range(24)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0.1 < rates[-1] < 0.12
    assert learning_rate(0, 1.0, 0, 1) == 1.0


def test_flops_of_a_token():
    configuration = read_configuration("small")
    # a layer: q and o 1024 x 1024, k and v 1024 x 256, gate, up and down 1024 x 2816; the head 1024 x 256
    weights = 2 * (2 * 1024**2 + 2 * 1024 * 256 + 3 * 1024 * 2816) + 1024 * 256
    assert flops_per_token(without_memory(configuration), configuration, 3) == 6 * weights + 12 * 1024 * 2 * 2


def test_results_are_medians_and_differences_relative():
    result = ModeResult("flash", "", [2.0, 1.0], [1.0, 3.0, 2.0], [0.1, 0.3, 0.2], [0.0, 0.5, 0.1], 9)
    assert as_json([result], Scale("m", Degrees(1, 1, 2), 100, 1e9, 1e10)) == {
        "schema": 1, "model": "m", "ranks": 2, "degrees": {"dp": 1, "up": 1, "tp": 2},
        "modes": [dict(zip(MODE, ["flash", [2.0, 1.0], 2.0, 50.0, 0.05, 0.2, 0.1, 9], strict=True))],
    }  # fmt: skip
    assert largest_difference([2.0, 1.1], [2.0, 1.0]) == pytest.approx(0.1)
    assert math.isnan(largest_difference([math.nan, 1.0, 5.0], [1.0, 1.0, 1.0]))


def test_micro_batches_give_the_gradient_of_the_whole(place):
    """Against one micro-batch of the same sequences, in one process and unparallelized."""
    grads = []
    for batch, accumulate in ((4, 1), (1, 4)):
        options = tiny(place, batch=batch, accumulate=accumulate)
        model = build(check_model(options), options, torch.device("cpu"))
        training = Training(model, torch.optim.AdamW(model.parameters(), **ADAMW), check(options), options)
        loss = training.forward_backward(3)
        grads.append([loss, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(grads[0], grads[1])


# --- the folder


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_of_steps_that_are_taken_again_are_dropped(tmp_path):
    metrics = Metrics(tmp_path, 0)
    for step in range(1, 6):
        metrics.add(step=step, mode="flash", loss=1.0 / step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # where a kill struck
    metrics = Metrics(tmp_path, 3)
    metrics.add(step=4, mode="flash", loss=0.5)
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3, 4]
    assert metrics.draw().stat().st_size > 1000


def test_a_partial_checkpoint_is_none(place, tmp_path):
    configuration, folder = read_configuration(str(place / "tiny.json")), CheckpointFolder(tmp_path)
    folder.begin(configuration, {})
    for step in (5, 10, 15):
        folder.partial(step).mkdir(parents=True)
        folder.publish(step, configuration, {"a": 1}, {})
    folder.partial(20).mkdir()
    assert folder.latest().step == 15
    assert len(folder.all()) == KEPT
    folder.begin(configuration, {})
    assert not folder.partial(20).exists()


# --- whole runs


def arguments(*given):
    return ["train", "--model", "tiny.json", "--data", "text.txt", "--seq", "32", *map(str, given)]


@contextlib.contextmanager
def directory(place):
    before = os.getcwd()
    os.chdir(place)
    try:
        yield
    finally:
        os.chdir(before)


def train(place, *given):
    """Runs the command from here, which has loaded torch already; its ranks are processes as ever."""
    with directory(place):
        return CliRunner().invoke(app, arguments(*given))


def metrics(place, out):
    return metrics_of(place / out)


def tensors(place, out, step):
    """All tensors of a checkpoint, whole."""
    file = place / f"{out}-{step}.pt"
    dcp_to_torch_save(place / out / "checkpoints" / f"step-{step:08d}", file)
    found = [each for each in tree_leaves(torch.load(file, weights_only=True)) if isinstance(each, torch.Tensor)]
    assert len(found) > 60  # weights, and two moments and a count for each
    return found


def kill_rank_1(process, place, out, step):
    """Kills rank 1 as soon as metrics show a step."""
    end_s = time.monotonic() + 90
    while not (place / out / "metrics.jsonl").exists() or len(metrics_so_far(place, out)) < step:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end_s
        time.sleep(0.002)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    environments = {int(pid): environment_of(pid) for pid in children}
    (pid,) = [pid for pid, environment in environments.items() if b"RANK=1" in environment]
    os.kill(pid, signal.SIGKILL)


def environment_of(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may have ended
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def metrics_so_far(place, out):
    return (place / out / "metrics.jsonl").read_text().splitlines()


def reported(output, mode):
    """The rows of the report that a run prints for a mode, by call site and operator: what else each says."""
    _, _, rest = output.partition(f"report of rank 0: the last step, mode {mode}; times in ms")
    head, *lines = rest.partition("\n\n")[0].splitlines()[1:]
    assert head.split("  ")[0] == "call site"
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    return {(site, op): said for site, op, *said in rows}


# flash and not auto, for which a tiny model's calls are too small to overlap
TRAIN = ("--ranks", 2, "--link", "none", "--steps", STEPS, "--checkpoint-every", EVERY, "--overlap", "flash")


@pytest.fixture(scope="module")
def whole(place):
    """An uninterrupted run."""
    done = train(place, *TRAIN, "--out", "whole", "--json", "whole.json")
    assert done.exit_code == 0, done.output
    return done


NOTING = """
from pathlib import Path
import flashoverlap.torch as fo
from flashoverlap.torch.call import REPORT
from flashoverlap.train import program
from flashoverlap.train.step import Training
step = Training.step

def noting(self, number):
    if number in (1, 2):
        REPORT.note("mlp: a transfer takes 4 times as long as before; planned anew from this call on")
    return step(self, number)

Training.step = noting
program.main(model="tiny.json", data=Path("text.txt"), seq=32, steps=4, out=Path("noted"))
"""


def test_what_happens_to_the_wire_is_said_at_once_and_once(place):
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-c", NOTING]
    done = subprocess.run(command, cwd=place, env={**os.environ, **alone}, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (at,) = [number for number, line in enumerate(lines) if "a transfer takes 4 times as long" in line]
    assert lines[at - 1].startswith("step 1/4")
    assert lines[at + 1].startswith("step 2/4")
    assert (place / "noted" / "report.txt").read_text().count("a transfer takes 4 times as long") == 2


@pytest.fixture(scope="module")
def killed(place):
    """A run whose rank 1 was killed: its exit status, what it said, and the steps that it had taken."""
    command = [sys.executable, "-m", "flashoverlap", *arguments(*TRAIN, "--out", "killed")]
    process = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    kill_rank_1(process, place, "killed", 2 * EVERY + 2)
    _, told = process.communicate(timeout=60)
    return process.returncode, told, len(metrics_so_far(place, "killed"))


@pytest.fixture(scope="module")
def resumed(place, killed):
    """The killed run, resumed."""
    done = train(place, *TRAIN, "--out", "killed", "--resume")
    assert done.exit_code == 0, done.output
    return done


def test_a_run_leaves_metrics_a_picture_and_its_checkpoints(place, whole):
    assert whole.output.count("step ") == STEPS
    lines = metrics(place, "whole")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(set(line) == METRICS and line["mode"] == "flash" for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert (place / "whole" / "loss.png").stat().st_size > 1000
    assert [path.name for path in sorted((place / "whole" / "checkpoints").iterdir())] == [
        "step-00000020", "step-00000024",
    ]  # fmt: skip
    assert (
        json.loads((place / "whole" / "checkpoints" / "step-00000024" / "config.json").read_text())["vocab_size"] == 256
    )
    result = json.loads((place / "whole.json").read_text())
    assert (result["schema"], result["model"], result["ranks"]) == (1, "tiny.json", 2)
    (mode,) = result["modes"]
    assert list(mode) == MODE
    assert mode["losses"] == [line["loss"] for line in lines]


def test_a_run_ends_with_the_report_of_its_last_step(place, whole):
    rows = reported(whole.output, "flash")
    *said, measured, predicted, blocked = rows["model.layers.*.mlp", "mlp backward"]
    assert said == ["flash", "flash direct x1", "rule_of_thumb", "2", "0.0"]
    assert float(measured) >= float(blocked) >= 0
    assert predicted == "-"  # nothing is planned where nothing was measured
    assert ("lm_head", "all_gather_linear") in rows
    assert ("loss", "all_reduce") in rows
    whole_report = (place / "whole" / "report.txt").read_text()
    assert [whole_report.count(f"model.layers.{layer}.mlp ") for layer in (0, 1)] == [2, 2]  # forward and backward
    assert "rule_of_thumb: 1 splits by rule of thumb, not by a plan" in whole_report
    assert "report:  whole/report.txt" in whole.output


def test_a_kill_loses_at_most_the_steps_since_the_checkpoint(killed, resumed):
    status, told, reached = killed
    assert status == 1
    assert told.startswith("flashoverlap train: rank ")
    first = int(resumed.output.partition("step-")[2].split()[0])
    assert 2 * EVERY <= first <= STEPS
    assert reached - first <= EVERY


def test_a_resumed_run_goes_on_bit_by_bit(place, whole, resumed):
    kept = ("step", "loss", "grad_norm", "lr")
    mine, theirs = ([[line[k] for k in kept] for line in metrics(place, out)] for out in ("killed", "whole"))
    assert mine == theirs
    torch.testing.assert_close(tensors(place, "killed", STEPS), tensors(place, "whole", STEPS), rtol=0, atol=0)


def test_it_goes_on_with_another_number_of_ranks(place, resumed):
    more = train(place, "--ranks", 1, "--link", "none", "--steps", STEPS + 2, "--out", "killed", "--resume")
    assert more.exit_code == 0, more.output
    assert "ranks 2 -> 1" in more.output
    lines = metrics(place, "killed")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 3))
    assert abs(lines[-1]["loss"] - lines[-3]["loss"]) < 1.0
    refused = train(place, "--steps", STEPS, "--out", "killed", "--resume")
    assert refused.exit_code == 2
    assert f"has done {STEPS + 2} already" in refused.output


def test_another_model_is_not_resumed(place, whole, monkeypatch):
    config(place, "wider", intermediate_size=64)
    monkeypatch.chdir(place)
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    result = CliRunner().invoke(
        app, ["train", "--model", "wider.json", "--seq", "32", "--out", "whole", "--resume", "--steps", "99"]
    )
    assert result.exit_code == 2
    assert "of another model: intermediate_size is 48 there and 64 here" in result.output
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before


def alone(place, *runs):
    """Losses of one process that takes the steps of several runs, each with its own options, one after another."""
    losses = []
    for options in runs:
        if not losses:
            model = build(check_model(options), options, torch.device("cpu"))
            training = Training(model, torch.optim.AdamW(model.parameters(), **ADAMW), check(options), options)
        training._options = options
        losses += [training.step(number).loss for number in range(len(losses), options.steps)]
    return losses


def test_a_mesh_learns_what_one_process_does_and_another_goes_on(place):
    """Sequences that nothing divides: over 2 x 2 ranks, then one to each of two ranks that share AdamW's state."""
    settings = ("--link", "none", "--seq", 31, "--accumulate", 2, "--out", "meshed")
    flash = ("--overlap", "flash")
    begun = train(place, *settings, "--steps", 2, "--up", 2, "--tp", 2, "--json", "meshed.json", *flash)
    assert begun.exit_code == 0, begun.output
    assert "tiny.json on 4 ranks (up 2 x tp 2)" in begun.output
    assert json.loads((place / "meshed.json").read_text())["degrees"] == {"dp": 1, "up": 2, "tp": 2}
    more = train(place, *settings, "--steps", 4, "--dp", 2, "--shard", "gradients", "--resume")
    assert more.exit_code == 0, more.output
    assert "ranks 4 -> 2, dp 1 -> 2, up 2 -> 1, tp 2 -> 1" in more.output
    assert "overlap flash -> auto" in more.output
    gradients = reported(more.output, "auto")["LlamaForCausalLM", "grad_reduce_scatter"]
    assert gradients[:4] == ["auto", "off", "small", "1"]
    want = alone(place, *(tiny(place, seq=31, accumulate=2, steps=steps) for steps in (2, 4)))
    assert [line["loss"] for line in metrics(place, "meshed")] == pytest.approx(want, rel=1e-5)


def test_replicas_of_a_split_model_go_on_on_other_splits(place):
    """Four ranks as 2 x 2, then all of them replicas, then one."""
    splits = (("--dp", 2, "--tp", 2, "--shard", "gradients"), ("--dp", 4, "--shard", "parameters"))
    settings = ("--link", "none", "--batch", 4, "--out", "splits", "--overlap", "flash")
    for steps, split in enumerate((*splits, ("--dp", 1, "--tp", 1)), 1):
        done = train(place, *settings, "--steps", steps, *split, *(("--resume",) if steps > 1 else ()))
        assert done.exit_code == 0, done.output
    want = alone(place, *(tiny(place, batch=4, steps=steps) for steps in range(1, 4)))
    assert [line["loss"] for line in metrics(place, "splits")] == pytest.approx(want, rel=1e-5)


def test_the_modes_learn_the_same(place):
    link = "none" if lab_unavailable() is not None else "100mbit"
    done = train(place, "--compare", "--ranks", 2, "--link", link, "--steps", 4, "--out", "compared", "--accumulate", 2)
    assert done.exit_code == 0, done.output
    assert "Losses agree: over 4 steps those of slice and flash are within 1e-05 of off's." in done.output
    rows = {mode: reported(done.output, mode)["model.layers.*.mlp", "mlp"] for mode in ("off", "slice", "flash")}
    assert [taken.split()[0] for _, taken, *_ in rows.values()] == [asked for asked, *_ in rows.values()] == list(rows)
    assert {calls for _, _, _, calls, *_ in rows.values()} == {"4"}  # two layers, two micro-batches
    assert done.output.rindex("report of rank 0") < done.output.index("peak MB")
    for name in ("compare.json", "loss.png", "report.txt", "trace.json"):
        assert f"compared/{name}" in done.output
    result = json.loads((place / "compared" / "compare.json").read_text())
    assert list(result) == ["schema", "model", "ranks", "degrees", "modes"]
    assert [mode["mode"] for mode in result["modes"]] == ["off", "slice", "flash"]
    for mode in result["modes"]:
        assert list(mode) == MODE
        assert mode["losses"] == pytest.approx(result["modes"][0]["losses"], rel=1e-5)
        assert len(mode["losses"]) == 4
        assert mode["peak_bytes"] > 100_000
    assert len(metrics(place, "compared")) == 3 * 4
    assert json.loads((place / "compared" / "trace.json").read_text())["traceEvents"]
