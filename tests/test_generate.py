"""Generation: what it refuses, text that comes in pieces, sharded loading, and the tokens of transformers itself."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from flashoverlap.cli import app
from flashoverlap.generate.decode import Chooser
from flashoverlap.generate.folder import read_folder
from flashoverlap.generate.load import build, fill
from flashoverlap.generate.options import Sampling
from flashoverlap.generate.text import ByteVocabulary, TextStream, encode_prompt, vocabulary_of
from flashoverlap.generate.weights import Weights, match
from flashoverlap.lab import Lab

PROMPT = "Grüße, 世界! "
TOKENS = 24
SIZES = {"vocab_size": 300, "max_position_embeddings": 96, "tie_word_embeddings": False}
HEADS = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
MODELS = {
    "llama": {"model_type": "llama", **SIZES, **HEADS},
    "qwen3": {"model_type": "qwen3", **SIZES, **HEADS, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 300, "n_positions": 96, "n_embd": 64, "n_layer": 2, "n_head": 4,
        "initializer_range": 0.3, "eos_token_id": None, "bos_token_id": None,
    },
}  # fmt: skip


def write(folder, name, **changes):
    """A random model as save_pretrained writes it; returns it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**MODELS[name], **changes})).eval()
    for parameter in model.parameters():  # norms and biases count too
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder, max_shard_size="40KB" if name == "llama" else "1GB")
    return model


def continued(model, prompt, tokens=TOKENS):
    """What transformers' own generation gives."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of the models, and their greedy tokens."""
    root, tokens = tmp_path_factory.mktemp("models"), {}
    for name in MODELS:
        tokens[name] = continued(write(root / name, name), list(PROMPT.encode()))
        assert len(set(tokens[name])) > 5, "a model that repeats one token proves nothing"
    return root, tokens


def call(*arguments):
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


# --- what is refused before a rank starts


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ranks", 0], "0"),
        (["--link", "fast"], "fast"),
        (["--tokens", 0], "--tokens 0"),
        (["--tokens", "many"], "many"),
        (["--temperature", -1], "--temperature -1"),
        (["--temperature", "nan"], "--temperature nan"),
        (["--temperature", 1, "--top-k", 0], "--top-k 0"),
        (["--temperature", 1, "--top-p", 1.5], "--top-p 1.5"),
        (["--top-k", 5], "--temperature"),
        (["--top-p", 0.5], "--temperature"),
        (["--seed", -1], "--seed -1"),
        (["--dtype", "int8"], "int8"),
        (["--overlap", "fast"], "fast"),
        (["--prompt", ""], "--prompt is empty"),
        (["--tokens", 90], "14 tokens and --tokens 90 make 104, and the model has max_position_embeddings 96"),
        (["--prompt", "x" * 97], "97"),
        (["--prompt", "\udcff"], "UTF-8"),
        (["--json", "/no/such/place/r.json"], "/no/such/place"),
        (["--checkpoint", "/no/such/model"], "/no/such/model"),
    ],
)
def test_bad_arguments_are_one_line_with_the_value_and_status_2(models, arguments, told):
    given = {"--checkpoint": models[0] / "llama", "--prompt": "Hello, world!\n", "--link": "none"}
    result = call(*(each for pair in given.items() for each in pair), *arguments)
    assert (result.exit_code, len(result.output.splitlines())) == (2, 1), result.output
    assert told in result.output


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "no config.json"),
        ({"config.json": "{"}, "JSON"),
        ({"config.json": "[]"}, "no JSON object"),
        ({"config.json": "{}"}, "names no model_type"),
        ({"config.json": '{"model_type": "bert"}'}, "'bert'; known: llama, "),
        ({"run.json": "{}"}, "no checkpoint yet"),
        ({"config.json": '{"model_type": "llama", "vocab_size": "many"}', "model.safetensors": ""}, "vocab_size is 'many'"),
        ({"config.json": '{"model_type": "llama"}'}, "neither model.safetensors nor"),
        ({"config.json": '{"model_type": "llama"}', "pytorch_model.bin": ""}, "pytorch_model.bin cannot be read"),
        ({"config.json": '{"model_type": "llama"}', "model.safetensors.index.json": "{}"}, "weight_map"),
        (
            {
                "config.json": '{"model_type": "llama"}',
                "model.safetensors.index.json": '{"weight_map": {"a": "b.safetensors"}}',
            },
            "b.safetensors, which is not there",
        ),
        ({"config.json": '{"model_type": "llama", "vocab_size": 255}', "model.safetensors": ""}, "255 is below the 256"),
        ({"config.json": '{"model_type": "llama"}', "model.safetensors": "", "tokenizer.json": "{}"}, "tokenizer.json"),
        ({"config.json": '{"model_type": "llama"}', "model.safetensors": "", "tokenizer.model": ""}, "AutoTokenizer"),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_model_is_told_in_one_line(tmp_path, files, told):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    result = call("--checkpoint", tmp_path, "--prompt", "x", "--link", "none")
    assert (result.exit_code, len(result.output.splitlines())) == (2, 1), result.output
    assert told in result.output
    assert str(tmp_path) in result.output


def test_the_end_tokens_are_those_of_the_generation_config(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 2}')
    (tmp_path / "model.safetensors").touch()
    assert read_folder(tmp_path).end_tokens == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_folder(tmp_path).end_tokens == (7, 8)


def test_the_last_checkpoint_of_a_training_run_is_meant(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    for step in (5, 10):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        (folder / "training.json").write_text(json.dumps({"step": step, "model": {}, "settings": {}}))
        (folder / ".metadata").touch()
    assert read_folder(tmp_path).path == folder
    assert read_folder(folder).path == folder


# --- text


@pytest.mark.parametrize("text", ["plain", "Grüße, 世界 🙂!", ""])
def test_text_comes_in_whole_characters(text):
    vocabulary = ByteVocabulary()
    stream = TextStream(vocabulary, list(b"before"))
    pieces = [stream.add(token) for token in vocabulary.encode(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.end() == ""


def test_bytes_that_are_no_text_are_marked_once_it_is_known():
    stream = TextStream(ByteVocabulary(), [1])
    assert [stream.add(token) for token in (0xE4, 0xB8, 0x41, 299, 0xE4)] == ["", "", "\ufffdA", "", ""]
    assert stream.end() == "\ufffd"


def test_a_tokenizer_beside_the_model(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {"▁a": 0, "▁b": 1, "c": 2, "<s>": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = vocabulary_of(tmp_path, 4)
    prompt = encode_prompt(vocabulary, "a b", 4)
    assert prompt == [0, 1]
    with pytest.raises(ValueError, match="token 1, beyond the model's vocabulary of 1"):
        encode_prompt(vocabulary, "a b", 1)
    with pytest.raises(ValueError, match="no tokens"):
        encode_prompt(vocabulary, " " * 0, 4)
    stream = TextStream(vocabulary, prompt)
    assert [stream.add(token) for token in (0, 2, 3, 1)] == [" a", "c", "", " b"]  # the space is that of a word


# --- weights and the model


def test_a_model_is_built_with_its_buffers_and_without_its_parameters(models):
    from transformers import AutoModelForCausalLM

    for name in MODELS:
        made = build(models[0] / name, torch.bfloat16)
        right = AutoModelForCausalLM.from_pretrained(models[0] / name)
        assert {parameter.device.type for parameter in made.parameters()} == {"meta"}
        assert {parameter.dtype for parameter in made.parameters()} == {torch.bfloat16}
        for (name, found), (wanted, buffer) in zip(made.named_buffers(), right.named_buffers(), strict=True):
            assert (name, found.dtype) == (wanted, buffer.dtype)
            assert torch.equal(found, buffer)


def test_filled_from_shards_with_ties_kept_and_dtypes_converted(models):
    for name in MODELS:
        model = build(models[0] / name, torch.float64)
        weights = Weights(sorted((models[0] / name).glob("*.safetensors")))
        files = match(model, weights.shapes)
        fill(model, weights.reader(files, {}, torch.float64))
        written = {k: v for file in (models[0] / name).glob("*.safetensors") for k, v in load_file(file).items()}
        for own, tensor in model.state_dict().items():
            assert torch.equal(tensor, written[files[own]].double())
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert tied == (name != "llama")


def altered(name, folder, change):
    """What match says of a model's file after a change to its shapes."""
    model = build(folder / name, torch.float32)
    shapes = Weights(sorted((folder / name).glob("*.safetensors"))).shapes
    change(shapes)
    return match(model, shapes)


def test_names_and_shapes_that_do_not_fit_are_all_told(models):
    def change(shapes):
        del shapes["model.norm.weight"]
        shapes["model.layers.2.mlp.up_proj.weight"] = (96, 64)
        shapes["lm_head.weight"] = (299, 64)

    with pytest.raises(ValueError) as told:
        altered("llama", models[0], change)
    assert str(told.value) == (
        "the weights do not fit LlamaForCausalLM: missing: model.norm.weight [64]; unexpected: "
        "model.layers.2.mlp.up_proj.weight [96, 64]; lm_head.weight is [299, 64] in the file and [300, 64] by "
        "config.json"
    )


def test_names_that_are_as_good(models):
    def older(shapes):  # GPT-2 of the hub: no prefix, and masks among the weights
        for name in list(shapes):
            shapes[name.removeprefix("transformer.")] = shapes.pop(name)
        shapes["h.0.attn.bias"] = (1, 1, 96, 96)

    assert altered("gpt2", models[0], older)["transformer.h.0.ln_1.bias"] == "h.0.ln_1.bias"

    def both(shapes):
        shapes["lm_head.weight"] = (300, 64)

    found = altered("qwen3", models[0], both)
    assert found["lm_head.weight"] == "lm_head.weight"

    def frequencies(shapes):
        shapes["model.layers.0.self_attn.rotary_emb.inv_freq"] = (8,)

    assert altered("llama", models[0], frequencies)


def test_files_that_hold_no_weights(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"a\.safetensors cannot be read as safetensors"):
        Weights([tmp_path / "a.safetensors"])
    save_file({"q": torch.ones(2, dtype=torch.int8)}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"q \[2\] is I8; .* quantized weights are not"):
        Weights([tmp_path / "b.safetensors"])


# --- choosing tokens


@pytest.mark.parametrize(
    "sampling", [(0.7, None, 1.0), (1.3, 5, 1.0), (1.0, None, 0.6), (0.9, 20, 0.8), (1.0, 1, 1e-9)]
)
def test_draws_have_the_chances_of_transformers(sampling):
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    temperature, top_k, top_p = sampling
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k or 40)])
    warpers.append(TopPLogitsWarper(top_p))
    chances = warpers(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0].softmax(-1)
    choose = Chooser(Sampling(temperature, top_k, top_p, seed=1))
    draws = torch.tensor([choose(logits) for _ in range(4000)]).bincount(minlength=40) / 4000
    assert not draws[chances == 0].any()
    assert (draws - chances).abs().max() < 0.03


def test_one_seed_one_text():
    logits = torch.zeros(1000)
    first, again, other = ([Chooser(Sampling(1.0, seed=seed))(logits) for _ in range(2)] for seed in (5, 5, 6))
    assert first == again != other
    with pytest.raises(ValueError, match="not finite"):
        Chooser(Sampling())(torch.tensor([0.0, torch.nan]))


# --- whole runs


def tokens_of(ranks, root, out):
    """The greedy tokens of every model on so many ranks: this file's own main, once per rank."""
    with Lab(ranks, "none") as lab, open(os.devnull, "w") as nowhere:
        lab.run([sys.executable, __file__, str(root), str(out)], timeout_s=60, stdout=nowhere, stderr=nowhere)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_greedy_tokens_are_those_of_transformers_and_no_rank_reads_more_than_its_own(models, ranks, tmp_path):
    root, tokens = models
    for told in tokens_of(ranks, root, tmp_path):
        for name in MODELS:
            assert told["read"][name] < 1.3 / ranks + 0.1  # a share, and what is replicated
            assert told["drawn"][name] == tokens[name][:4]
        assert told["tokens"].pop("trained") == tokens["gpt2"]
        assert told["tokens"] == tokens
        assert told["modes"] == ["flash"]


def ours(root, out):
    """One rank of the test above."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    import flashoverlap.torch as fo
    from flashoverlap.generate.decode import generate
    from flashoverlap.generate.load import load

    read = Weights._read
    sizes = []
    Weights._read = lambda *a: sizes.append((part := read(*a)).numel()) or part
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    told = {"tokens": {}, "read": {}, "drawn": {}, "modes": []}
    prompt = list(PROMPT.encode())
    for name in (*MODELS, "trained"):
        sizes.clear()
        model = load(out if name == "trained" else root / name, mesh, torch.float32, fo.Overlap("flash"))
        told["read"][name] = sum(sizes) / sum(parameter.numel() for parameter in model.parameters())
        made = generate(model, prompt, TOKENS, Sampling())
        told["tokens"][name] = made.tokens
        told["drawn"][name] = generate(model, prompt, 4, Sampling(0.001, 50, 0.9)).tokens
        told["modes"] = sorted({record["mode_taken"] for phase in made.records.values() for record in phase})
        if name == "gpt2":  # which is split and tied: written as training would, and read again
            dcp.save({"model": model.state_dict()}, checkpoint_id=out)
            (out / "config.json").write_bytes((root / name / "config.json").read_bytes())
            dist.barrier()
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def test_the_command_shows_the_text_and_writes_its_file(models, tmp_path):
    folder = models[0] / "llama"
    greedy = models[1]["llama"]
    (tmp_path / "model").symlink_to(folder)
    result = call(
        "--checkpoint", tmp_path / "model", "--prompt", PROMPT, "--ranks", 2, "--tokens", TOKENS, "--json",
        tmp_path / "r.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "r.json").read_text())
    assert list(written) == [
        "schema", "ranks", "prompt_tokens", "tokens", "text", "prefill_seconds", "decode_seconds_per_token",
        "checkpoint",
    ]  # fmt: skip
    assert (written["schema"], written["ranks"], written["prompt_tokens"]) == (1, 2, len(PROMPT.encode()))
    assert written["tokens"] == greedy
    assert written["text"] == ByteVocabulary().decode(greedy)
    assert "prefill: 17 tokens" in result.output
    assert "linear_all_reduce" in result.output


def test_an_end_token_ends_the_text_and_one_rank_is_enough(models, tmp_path):
    end = models[1]["gpt2"][-1]
    folder = tmp_path / "gpt2"
    folder.mkdir()
    for file in (models[0] / "gpt2").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    sampled = ("--temperature", 0.001, "--top-k", 50, "--top-p", 0.9, "--seed", 3)
    result = call(
        "--checkpoint", folder, "--prompt", PROMPT, "--ranks", 1, "--json", tmp_path / "r.json", *sampled,
        "--dtype", "float64",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    tokens = json.loads((tmp_path / "r.json").read_text())["tokens"]
    assert tokens == models[1]["gpt2"][: models[1]["gpt2"].index(end) + 1]


def test_what_the_ranks_refuse_is_one_line_and_status_2(models, tmp_path):
    tensors = load_file(models[0] / "gpt2" / "model.safetensors")
    del tensors["transformer.ln_f.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((models[0] / "gpt2" / "config.json").read_text())
    result = call("--checkpoint", tmp_path, "--prompt", "x", "--ranks", 2)
    assert (result.exit_code, len(result.output.splitlines())) == (2, 1), result.output
    assert "missing: transformer.ln_f.bias [64]" in result.output


if __name__ == "__main__":
    ours(Path(sys.argv[1]), Path(sys.argv[2]))
