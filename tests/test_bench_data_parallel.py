"""bench dp: its sizes, its reference, the tails, wrong values, and whole runs beside DDP and FSDP2."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from flashoverlap.bench.candidates import candidates
from flashoverlap.bench.data_parallel import Steps
from flashoverlap.bench.matmul_clock import MatmulClock, Tails
from flashoverlap.bench.options import Options
from flashoverlap.bench.run import run
from flashoverlap.bench.shapes import LlmShape, StackShape
from flashoverlap.bench.stack import Stack
from flashoverlap.bench.values import compare
from flashoverlap.lab import lab_unavailable

STACK = StackShape(3, 32, 16, steps=2)
LLM = LlmShape(1, 32, 16, "gradients", 2, 4, 2, 24, 32)


# --- sizes


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shape": StackShape(layers=0)}, "--layers 0: at least 1"),
        ({"shape": StackShape(steps=0)}, "--steps 0: at least 1"),
        ({"shape": StackShape(shard="half")}, "--shard half: unknown; known: none, gradients, parameters"),
        ({"phase": "forward"}, "--pass forward: bench dp runs train"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16: bench dp runs float32, float64"),
        ({"peers": ("dtensor",)}, "--peers dtensor can run bench mlp, bench block, bench model, not dp"),
        ({"shape": StackShape(shard="none"), "peers": ("fsdp2",)}, "--peers fsdp2 shards .*, not --shard none"),
        ({"shape": LlmShape(hidden=100)}, "--hidden 100: a multiple of 2 x --heads 16"),
        ({"shape": LlmShape(tokens=1)}, "--tokens 1: at least 2"),
    ],
)
def test_meaningless_options_are_refused_with_their_value(options, told):
    with pytest.raises(ValueError, match=told):
        Options(**{"shape": STACK, "phase": "train", **options})


@pytest.mark.parametrize("shape", [STACK, LLM])
def test_options_survive_json(shape):
    options = Options(shape, peers=("ddp", "fsdp2"), phase="train")
    assert Options.from_json(options.to_json()) == options


@pytest.mark.parametrize(("shard", "layers"), [("none", 4), ("gradients", 4), ("parameters", 5)])
def test_ideal_bytes(shard, layers):
    """Of two layers, each moved twice; the first once more, for its backward, where parameters are sharded."""
    assert StackShape(2, 6, shard=shard).ideal_elements(4, True) == layers * 36 * 3 // 4
    assert StackShape(1, 3).ideal_elements(2, True) == 2 * 5  # of 9, the rank with 4 gets 5


def test_the_number_of_parameters():
    pytest.importorskip("transformers")
    from flashoverlap.bench.llm import Llm

    for case in (Stack(STACK, torch.float32, 0, 2), Llm(LLM, torch.float32, 0, 2)):
        assert case.shape.parameters == sum(parameter.numel() for parameter in case.model.parameters())


def test_candidates():
    rows = [(one.row, one.variant[:10], one.note) for one in candidates(
        Options(STACK, modes=("slice", "flash"), peers=("ddp", "fsdp2"), phase="train")
    )]  # fmt: skip
    assert rows == [
        ("compute", "", ""), ("off", "", ""), ("slice", "", ""), ("flash", "", ""),
        ("ddp", "buckets as", "best of 2"), ("ddp", "buckets of", "best of 2"), ("fsdp2", "", ""),
    ]  # fmt: skip


# --- reference and values


def test_the_reference_takes_steps_on_the_joint_batch():
    cases = [Stack(STACK, torch.float64, rank, 2) for rank in range(2)]
    model = copy.deepcopy(cases[0].model)
    x, coefficients = (torch.cat(parts) for parts in zip(*cases[0]._rows, strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=Stack.lr)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    losses = []
    for _ in range(2):
        rows = (model(x) * coefficients).sum(1)
        losses.append(rows.detach())
        rows.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for case, own in zip(cases, (slice(0, 16), slice(16, 32)), strict=True):
        found = case.reference(True)
        torch.testing.assert_close(found["out"], torch.stack([rows[own].mean() for rows in losses]))
        changes = [after.detach() - first for after, first in zip(model.parameters(), before, strict=True)]
        torch.testing.assert_close([found[name] for name in ("0.weight", "2.weight", "4.weight")], changes)


def test_steps_begin_anew_after_clear_and_are_right_for_one_rank():
    case = Stack(STACK, torch.float64, 0, 1)
    steps, reference = Steps(case, copy.deepcopy(case.model)), case.reference(True)
    for _ in range(2):
        steps.clear()
        found = steps.results(steps.run(case.grad))
        assert compare(found, reference, 1e-12, case.units)[1] == ""
    steps.prepare()
    assert "differs" in compare(steps.results(steps.run(case.grad)), reference, 1e-3, case.units)[1]


def test_a_small_error_in_a_small_change_is_seen():
    """Changes are a thousandth of the parameters; the tolerance is for each unit of them."""
    case = Stack(STACK, torch.float64, 0, 1)
    reference = case.reference(True)
    wrong = {**reference, "2.weight": reference["2.weight"] * 1.001}
    assert compare(wrong, reference, 1e-4)[1] == ""
    assert "2.weight differs" in compare(wrong, reference, 1e-4, case.units)[1]


# --- tails


def test_a_clock_of_matmuls():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with MatmulClock() as clock:
        out = model(torch.ones(3, 4)).sum()
        clock.turn()
        out.backward()
    assert (len(clock._forward), len(clock._backward)) == (2, 3)  # addmm each; two for weights and one in between
    tails = clock.tails(clock._forward[0][0] - 1.0, clock._backward[-1][1] + 2.0)
    assert tails == pytest.approx(Tails(1.0, 2.0))


def test_tails_of_a_step():
    case = Stack(STACK, torch.float64, 0, 1)
    tails = Steps(case, copy.deepcopy(case.model)).tails()
    assert min(tails) > 0


# --- whole runs


@pytest.mark.skipif(lab_unavailable() is not None, reason="no lab on this machine")
@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_a_stack_on_a_link_beside_its_peers(shard):
    peers = ("ddp",) if shard == "none" else ("ddp", "fsdp2")
    shape = StackShape(2, 256, 16, shard, 2)  # large enough for exchanges of a weight's own
    options = Options(shape, 2, "1gbit", ("slice", "flash"), peers, "train", repeats=1)
    outcome = run(options, timeout_s=100)
    assert outcome.complaints == []
    rows = {row["mode"]: row for row in outcome.result["rows"]}
    assert list(rows) == ["compute", "off", "slice", "flash", *peers]
    assert rows["off"]["wire_bytes"] == rows["flash"]["wire_bytes"] == options.ideal_bytes
    assert rows["compute"]["first_matmul_seconds"] < rows["compute"]["seconds"]
    for mode, row in rows.items():
        assert row["gradients_ready_seconds"] >= 0
        assert (row["peak_bytes"] is None) == (mode == "compute")
    assert rows["ddp"]["detail"].startswith("buckets")


def test_the_llm():
    pytest.importorskip("transformers")
    options = Options(LLM, 2, "none", ("flash",), ("ddp", "fsdp2"), "train", repeats=1)
    outcome = run(options, timeout_s=100)
    assert outcome.complaints == []
    assert [row["mode"] for row in outcome.result["rows"]] == ["compute", "off", "flash", "ddp", "fsdp2"]


def test_parameters_of_one_rank_alone_are_seen():
    """What a rank computes without the others is wrong: the plain model in place of a data-parallel one."""
    case = Stack(STACK, torch.float64, 0, 2)
    steps = Steps(case, copy.deepcopy(case.model))
    complaint = compare(steps.results(steps.run(case.grad)), case.reference(True), 1e-4, case.units)[1]
    assert "0.weight differs" in complaint
