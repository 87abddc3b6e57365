"""Models, devices, groups and memory that estimates are made of."""

from __future__ import annotations

import importlib
import json
import math

import pytest
import torch
import transformers

from flashoverlap.alike import alike_after
from flashoverlap.cluster.cluster import measured_cluster, published_cluster
from flashoverlap.cluster.configuration import from_configuration, model_shape
from flashoverlap.cluster.find import find_cluster, usual_dtype
from flashoverlap.cluster.memory import Training, memory_of
from flashoverlap.cluster.models import MODELS
from flashoverlap.cluster.operators import Layers
from flashoverlap.cluster.published import PUBLISHED
from flashoverlap.cluster.split import Split, refusal, splits_of
from flashoverlap.cluster.step import estimate
from flashoverlap.machine import Link, Machine
from flashoverlap.machine_file import write
from flashoverlap.matmul import Matmul

PARAMETERS = {  # of the authors' own files
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
}


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_parameters_that_were_published(name):
    shape = MODELS[name]
    assert shape.parameters == pytest.approx(shape.parameters_published, rel=4e-3)
    assert shape.parameters == PARAMETERS.get(name, shape.parameters)


SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("mistral", {}),
        ("qwen2", {"head_dim": None}),
        ("qwen3", {}),
        ("gemma", {}),
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("gpt2", {}),
    ],
)
def test_a_configuration_has_the_parameters_of_its_model(kind, changed):
    sizes = {key: value for key, value in {**SMALL, **changed}.items() if value is not None}
    if kind == "gpt2":
        sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 16}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = from_configuration(json.loads(config.to_json_string(use_diff=False)), kind)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert from_configuration({"model_type": kind, **sizes}, kind) == shape  # what transformers leaves out


def test_a_model_is_found_by_name_by_file_and_by_folder(tmp_path):
    written = {**SMALL, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert model_shape(str(tmp_path)).parameters == from_configuration(written, "").parameters
    assert model_shape(str(tmp_path / "config.json")).hidden == 32
    assert model_shape("llama-3-8b") is MODELS["llama-3-8b"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "no JSON"),
        ("[]", "no configuration"),
        ('{"model_type": "mamba"}', "'mamba' is not known"),
        ('{"model_type": "llama", "hidden_size": 0}', "not None"),
        (json.dumps({**SMALL, "model_type": "llama", "vocab_size": "many"}), "vocab_size must be a whole number"),
    ],
)
def test_a_configuration_that_is_none_is_told(tmp_path, text, told):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=told):
        model_shape(str(tmp_path))


def test_an_unknown_model_is_told_with_those_known():
    with pytest.raises(ValueError, match=r"'llama-9'; models: .*llama-3-8b"):
        model_shape("llama-9")


def test_arithmetic_of_a_token():
    shape = MODELS["llama-3-8b"]
    assert shape.flops_per_token(1) == 6 * (shape.parameters - shape.head_weights - 65 * 4096) + 12 * 4096 * 32
    assert MODELS["mistral-7b"].mean_keys(4096) == 4097 / 2  # the window is as long as the sequence
    assert MODELS["mistral-7b"].mean_keys(8192) == (4096 * 4097 / 2 + 4096 * 4096) / 8192


# --- devices


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_device(name):
    entry = PUBLISHED[name]
    assert name == entry.name
    assert len(entry.source) > 40
    assert 1e12 < entry.flops_per_s["bfloat16"] < 1e16
    assert entry.link_bytes_per_s >= entry.uplink_bytes_per_s
    cluster = published_cluster(entry, "bfloat16")
    size = 2**13
    seconds = cluster.matmul.seconds(size, size, size, 2)
    assert seconds == pytest.approx(2 * size**3 / (entry.flops_per_s["bfloat16"] * entry.assumed.matmul), rel=1e-2)
    assert cluster.machine.transfer_s(10**9) == pytest.approx(
        1e9 / entry.link_bytes_per_s / entry.assumed.wire, rel=0.2
    )


def test_a_dtype_without_a_figure_is_refused():
    with pytest.raises(ValueError, match="ascend-910b has no published figure for float32; it has bfloat16"):
        find_cluster("ascend-910b", "float32")
    with pytest.raises(ValueError, match=r"'h100'; machines: h100-nvlink"):
        find_cluster("h100", "bfloat16")


H100 = published_cluster(PUBLISHED["h100-nvlink"], "bfloat16")


@pytest.mark.parametrize(
    ("size", "stride", "nodes"),
    [
        (8, 1, ()),  # one node
        (2, 4, ()),
        (16, 1, (8, 8)),
        (4, 4, (2, 2)),
        (16, 4, (2,) * 8),
        (8, 8, ()),  # one rank a node
        (8, 64, ()),
        (3, 1, (1, 2)),  # ranks 6, 7, 8: of the groups that cross, one of those that cross most
        (1, 1, ()),
    ],
)
def test_the_nodes_of_a_group(size, stride, nodes):
    machine = H100.group(size, stride)
    assert sorted(machine.nodes) == sorted(nodes)
    inside = size * stride <= 8 or nodes
    assert machine.link == (H100.machine.link if inside else H100.uplink)
    if nodes:
        assert machine.uplink.bytes_per_s == min(nodes) * H100.uplink.bytes_per_s


def test_a_mesh_has_a_wire_to_each_rank():
    mi300x = published_cluster(PUBLISHED["mi300x"], "bfloat16")
    assert [mi300x.group(size).ports for size in (1, 2, 4, 8)] == [1, 1, 3, 7]
    nbytes = 64 * 2**20
    four, eight = (mi300x.group(size).collective_s(size - 1, nbytes) for size in (4, 8))
    assert four > 1.8 * eight
    assert mi300x.group(16).ports == 7
    assert mi300x.group(2, 8).ports == 1  # between nodes each rank has one port


def test_a_calibrated_machine_is_a_cluster(tmp_path):
    matmul = Matmul(1e12, memory_bytes_per_s=1e11, efficiency=((64, 64, 64, 0.25), (1024, 64, 64, 0.5)))
    machine = Machine(
        Link(1e-4, 1e9), matmul=matmul, nodes=(2, 2), uplink=Link(2e-4, 1e8), links=(Link(1e-4, 1e9), Link(1e-4, 5e8))
    )
    write(tmp_path / "m.json", machine, {})
    cluster = find_cluster(str(tmp_path / "m.json"), "bfloat16", memory_bytes=8e9)
    assert (cluster.peak_flops_per_s, cluster.memory_bytes, cluster.assumed) == (1e12, 8e9, None)
    assert cluster.group(2) == Machine(Link(1e-4, 5e8), matmul=matmul)
    assert cluster.group(4).uplink == machine.uplink
    assert cluster.group(2, 2).link == Link(2e-4, 5e7)
    with pytest.raises(ValueError, match="old says nothing of matmuls"):
        measured_cluster(Machine(Link(0, 1e9)), "old")


def test_what_a_file_was_measured_in_is_what_is_planned_in(tmp_path):
    machine, path = Machine(Link(1e-4, 1e9), matmul=Matmul(1e12)), tmp_path / "m.json"
    for about, dtype in (({"dtype": "bfloat16"}, "bfloat16"), ({"dtype": "float32"}, "float32"), ({}, "float32")):
        write(path, machine, about)
        assert usual_dtype(str(path)) == dtype
    assert usual_dtype("mi300x") == "bfloat16"
    write(path, machine, {"dtype": ["float64"]})
    with pytest.raises(ValueError, match=r"m\.json was measured in \['float64'\]; --dtype must say in which of"):
        usual_dtype(str(path))


# --- splits and memory


@pytest.mark.parametrize("shard", ["none", "gradients", "parameters"])
def test_weights_of_all_ranks_of_up_are_those_of_replicas(shard):
    """What is exchanged between 2 replicas of 2 ranks of up is what 4 replicas exchange, once a step, behind backward."""
    work = Training(2048, shard=shard, micro_batches=3)
    steps = [estimate(MODELS["llama-3-8b"], H100, split, work) for split in (Split(2, 2, 2), Split(4, 1, 2))]
    between = [[call for call in step.calls if call.axis == "dp"] for step in steps]
    fields = ("site", "phase", "op", "times", "ranks", "mode", "seconds", "bytes")
    first, second = ([[getattr(call, field) for field in fields] for call in calls] for calls in between)
    assert first == second
    assert {call.site for call in between[0]} == {"gradients", "end gradients"} | (
        {"weights"} if shard != "none" else set()
    )
    assert next(call for call in between[0] if call.site == "gradients").times == 32
    assert all("all_to_all" in call.op for call in steps[0].calls if call.axis == "up")
    held = [step.memory for step in steps]
    assert (held[0].parameters, held[0].gradients) == (held[1].parameters, held[1].gradients)


def test_without_replicas_ranks_of_up_still_exchange_gradients():
    step = estimate(MODELS["llama-3-8b"], H100, Split(1, 4, 2), Training(2048))
    gradients = [call for call in step.calls if call.axis == "dp"]
    assert [(call.op, call.ranks) for call in gradients] == [("reduce_scatter + all_gather", 4)] * 2
    assert not [c for c in estimate(MODELS["llama-3-8b"], H100, Split(1, 1, 8), Training(2048)).calls if c.axis == "dp"]


def test_copies_have_as_many_rows_of_the_weights_each(monkeypatch):
    """Ranks of 1024 devices are alike, so that few are replayed; and what is sent is the parameters and no more."""
    planner, replayed = importlib.import_module("flashoverlap.plan"), []

    def replay(schedule, machine, **options):
        replayed.append(alike_after(schedule, machine))
        return simulate(schedule, machine, **options)

    simulate = planner.simulate
    monkeypatch.setattr(planner, "simulate", replay)
    planner._plan.cache_clear()
    step = estimate(MODELS["llama-3-8b"], H100, Split(512, 1, 2), Training(2048, shard="parameters"))
    assert max(replayed) <= 8
    weights = next(call for call in step.calls if call.site == "weights")
    parameters = Layers(step.model, step.split, step.work).parameters
    assert weights.bytes == pytest.approx(2 * parameters * 511 / 512, rel=1e-3)


def test_splits():
    assert {split.devices for split in splits_of(12)} == {12}
    assert len(list(splits_of(1024))) == len(set(splits_of(1024))) == 66
    assert str(Split(2, 4, 8)) == "dp 2 x up 4 x tp 8"


@pytest.mark.parametrize(
    ("split", "tokens", "code"),
    [
        (Split(1, 1, 64), 8192, "heads"),
        (Split(1, 3, 1), 8192, "heads"),
        (Split(1, 2, 16), 8192, None),  # ranks share a head of keys
        (Split(1, 4, 2), 4, "tokens"),
        (Split(64, 4, 8), 8192, None),
    ],
)
def test_what_cannot_be_split(split, tokens, code):
    told = refusal(MODELS["llama-3-8b"], split, tokens)
    assert (told and told.code) == code


def test_memory_is_spread_as_asked():
    shape, n = MODELS["llama-3-8b"], MODELS["llama-3-8b"].parameters
    alone = memory_of(shape, Split(), Training(2048))
    assert (alone.parameters, alone.gradients, alone.optimizer) == (2 * n, 2 * n, 12 * n)
    of = {
        shard: memory_of(shape, Split(8), Training(2048, shard=shard)) for shard in ("none", "gradients", "parameters")
    }
    assert of["none"] == alone
    assert (of["gradients"].parameters, of["gradients"].optimizer) == (2 * n, 12 * n / 8)
    assert (of["parameters"].parameters, of["parameters"].gradients) == (2 * n / 8, 2 * n / 8)
    assert of["parameters"].buffers > of["gradients"].buffers
    assert memory_of(shape, Split(), Training(2048, dtype="float32")).optimizer == 8 * n
    cut = memory_of(shape, Split(1, 2, 4), Training(2048))
    assert cut.activations == pytest.approx(alone.activations / 8, rel=1e-9)
    assert cut.parameters == pytest.approx(alone.parameters / 4, rel=1e-3)  # norms are on every rank
    again = memory_of(shape, Split(), Training(2048, recompute=True))
    assert again.activations < alone.activations / 4
    assert math.isclose(again.total - again.activations, alone.total - alone.activations)


def test_a_head_of_keys_that_ranks_share_is_on_each():
    shape = MODELS["llama-3-8b"]
    sixteen, eight = (memory_of(shape, Split(1, 1, tp), Training(2048)).parameters for tp in (16, 8))
    assert sixteen > eight / 2 + 32 * 4096 * 128  # half a head of keys and one of values more than half
