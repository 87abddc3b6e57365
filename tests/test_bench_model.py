"""bench block and bench model: their sizes, their references, and whole runs beside the peers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from flashoverlap.bench import options as bench_options
from flashoverlap.bench.options import Options
from flashoverlap.bench.peers import missing
from flashoverlap.bench.run import run
from flashoverlap.bench.shapes import BlockShape, ModelShape
from flashoverlap.bench.values import compare
from flashoverlap.lab import lab_unavailable

pytest.importorskip("transformers")

from flashoverlap.bench.block import Block  # they need transformers
from flashoverlap.bench.llama import causal_lm, exact, in_float64
from flashoverlap.bench.model import Model

BLOCK = BlockShape(64, 32, 8, 4, 48)
MODEL = ModelShape(64, 32, 8, 4, 48, layers=1, vocab=96)


# --- sizes


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shape": BlockShape(kv_heads=0)}, "--kv-heads 0: at least 1"),
        ({"shape": BlockShape(batch=-1)}, "--batch -1: at least 1"),
        ({"shape": ModelShape(layers=0)}, "--layers 0: at least 1"),
        ({"shape": BlockShape(hidden=1000)}, "--hidden 1000: a multiple of 2 x --heads 16"),
        ({"shape": BlockShape(kv_heads=3)}, "--kv-heads 3: a divisor of --heads 16"),
        ({"shape": BlockShape(seq=2047)}, "--seq 2047: a multiple of --ranks 2"),
        ({"shape": BlockShape(seq=30), "ranks": 3}, "--heads 16: a multiple of --ranks 3"),
        ({"shape": BlockShape(seq=30, hidden=48, heads=12, kv_heads=2), "ranks": 3}, "--kv-heads 2: a multiple or a d"),
        ({"peers": ("megatron",)}, "--peers megatron can run bench mlp, not block"),
        ({"shape": BlockShape(kv_heads=1), "peers": ("hf",)}, "--peers hf cannot take --kv-heads 1"),
        ({"shape": ModelShape(vocab=511), "peers": ("dtensor",)}, "--peers dtensor cannot take --vocab 511"),
    ],
)
def test_meaningless_options_are_refused_with_their_value(options, told):
    with pytest.raises(ValueError, match=told):
        Options(**{"shape": BLOCK, **options})


def test_a_package_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(bench_options, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="bench block needs transformers, which is not installed"):
        Options(BLOCK)


@pytest.mark.parametrize("shape", [BLOCK, MODEL])
def test_options_survive_json(shape):
    options = Options(shape, 4, "100mbit", ("flash",), ("dtensor", "hf"), "train")
    assert Options.from_json(options.to_json()) == options


@pytest.mark.parametrize(("train", "block", "model"), [(False, 4, 4 * 3 + 2), (True, 10, 10 * 3 + 5)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ideal_bytes_are_those_of_each_gather_and_scatter(ranks, train, block, model):
    rows = 64 * (ranks - 1) // ranks * 32
    assert BLOCK.ideal_elements(ranks, train) == block * rows
    assert ModelShape(64, 32, 8, 4, 48, batch=2, layers=3).ideal_elements(ranks, train) == model * rows * 2


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 2), (4, 4), (8, 4)])
def test_reduced_shapes_are_uneven_and_share_heads_alike(ranks, kv_heads):
    for shape in (BLOCK, MODEL):
        small = shape.reduced(ranks)
        assert type(small) is type(shape)
        assert (small.seq % ranks, small.ffn % ranks, small.heads % ranks, small.kv_heads) == (1, 1, 0, kv_heads)


# --- references


def test_the_reference_is_the_unsharded_layer():
    cases = [Block(BLOCK, torch.float32, rank, 2) for rank in range(2)]
    layer, x = copy.deepcopy(cases[0].layer), cases[0].x.clone().requires_grad_()
    out = layer(x, position_embeddings=cases[0].positions)
    out.backward(cases[0].full_grad)
    found = [case.reference(True) for case in cases]
    expected = {name: weight.grad for name, weight in layer.named_parameters()}
    assert all(one.keys() == {"out", "x", *expected} for one in found)
    for name, right in expected.items():
        assert found[0][name].dtype == torch.float64
        assert compare({name: right}, {name: found[0][name]}, 1e-5)[1] == ""
    for name, right in (("out", out), ("x", x.grad)):
        assert compare({name: right}, {name: torch.cat([one[name] for one in found], 1)}, 1e-5)[1] == ""


def test_the_reference_is_the_unsharded_model():
    case = Model(MODEL, torch.float32, 0, 2)
    model = copy.deepcopy(case.model)
    loss = model(input_ids=case.ids, labels=case.ids).loss
    (loss * 64).backward()
    found = case.reference(True)
    for name, right in {"out": loss, **{name: weight.grad for name, weight in model.named_parameters()}}.items():
        assert compare({name: right}, {name: found[name]}, 1e-5)[1] == ""
        if name != "out":
            assert found[name].abs().max() > 0.1  # of a size at which the tolerance means something


def test_float64_is_float64_throughout():
    made = causal_lm(MODEL, torch.float32, torch.Generator().manual_seed(0))
    assert exact(made, torch.float32) is made
    assert type(made.model.norm).__module__.startswith("transformers.")
    ids = torch.arange(64).unsqueeze(0)
    model = in_float64(made)
    loss = model(input_ids=ids, labels=ids).loss
    noise = 1e-12
    model.model.embed_tokens.weight.data += noise  # lost where anything is rounded to float32
    moved = model(input_ids=ids, labels=ids).loss
    assert loss.dtype == torch.float64
    assert 0 < abs((moved - loss).item()) < 1e-9


@pytest.fixture
def mesh():
    """Rank 1 of 2, of which the other is not there."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_of_a_dtensor_the_own_shard_is_compared(mesh):
    whole = torch.arange(10, dtype=torch.float64).view(5, 2)
    shard = DTensor.from_local(whole[3:], mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(2, 1))
    assert compare({"w": shard}, {"w": whole}, 1e-9) == (0.0, "")
    assert "differs by 1" in compare({"w": shard}, {"w": whole + 1}, 1e-9)[1]
    assert "not [4, 2]" in compare({"w": shard}, {"w": whole[:4]}, 1e-9)[1]
    same = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    assert compare({"w": same}, {"w": whole}, 1e-9) == (0.0, "")
    due = DTensor.from_local(whole / 2, mesh, [Partial()], run_check=False)
    assert "differs by" in compare({"w": due}, {"w": whole}, 1e-9)[1]


# --- whole runs


def check_rows(outcome, options, small):
    """All values right, and the bytes those that are ideal, beside a few small ones."""
    assert outcome.complaints == []
    rows = {row["mode"]: row for row in outcome.result["rows"]}
    assert rows["compute"]["wire_bytes"] == 0
    assert rows["off"]["wire_bytes"] == rows["flash"]["wire_bytes"] == options.ideal_bytes + small
    assert all(row["max_abs_error"] < 1e-4 for mode, row in rows.items() if mode != "compute")
    return list(rows)


def test_block_forward_beside_its_peers():
    peers = ("dtensor",) if missing("hf") else ("dtensor", "hf")
    options = Options(BLOCK, 2, "none", ("flash", "collective"), peers, repeats=1)
    outcome = run(options, timeout_s=100)
    assert check_rows(outcome, options, 0) == ["compute", "off", "flash", "collective", *peers]
    assert (outcome.result["case"], outcome.result["shape"]["kv_heads"]) == ("block", 4)


@pytest.mark.skipif(lab_unavailable() is not None, reason="no lab on this machine")
def test_model_train_on_a_link():
    peers = ("dtensor",) if missing("hf") else ("dtensor", "hf")
    options = Options(MODEL, 2, "100mbit", ("flash",), peers, "train", repeats=1)
    outcome = run(options, timeout_s=100)
    small = 3 * 64 * 4 + 3 * 32 * 4  # of the loss, and the gradients of the norms
    assert check_rows(outcome, options, small) == ["compute", "off", "flash", *peers]
