"""Tensors whose values are elsewhere, and code that a plan must not misread: see model_ranks.py."""

import copy
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as hf
from torch import nn

import flashoverlap.torch as fo
from model_cases import close, full, gpt2, llama, made, refused, tokens
from plan_cases import BLOCK, Block, refused_plan, rows


class Reading(nn.Module):
    """Attention whose code reads the hidden states itself, and a head that wants all rows."""

    def __init__(self):
        super().__init__()
        for name in ("norm", "last"):
            setattr(self, name, nn.LayerNorm(24))
        self.attention = Attending()
        self.score = nn.Linear(24, 3)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return self.score(self.last(x))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(24, 24))

    def forward(self, h):
        q, k, v = (m(input=h).unflatten(-1, (-1, 2)).transpose(1, 2) for m in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.o(out * h.mean(-1, keepdim=True))


READING = {
    "norm": fo.SequenceParallel(),
    "attention": fo.ParallelAttention("q", "k", "v", "o", heads=12),
    "last": fo.SequenceParallel(looks_full=True),
    "score": fo.Replicated(),
}


def case_whoever_reads_rows_gets_all_of_them(mesh):
    for settings in ({}, {"attention": "query_split"}, {"sequence_parallel": False}):
        dense = Reading().double()
        model = fo.parallelize(copy.deepcopy(dense), mesh, READING, **settings)
        x = torch.randn(2, 9, 24, dtype=torch.float64)
        whole = x.clone().requires_grad_()
        here = (rows(x, mesh) if settings.get("sequence_parallel", True) else x).clone().requires_grad_()
        want, found = dense(whole), model(here)
        close(found, want, f"{settings}", 1e-10)
        seed = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        want.backward(seed)
        found.backward(seed)
        part = rows(whole.grad, mesh) if settings.get("sequence_parallel", True) else whole.grad
        close(here.grad, part, f"{settings} gradient of the input", 1e-10)
        for (name, parameter), other in zip(model.named_parameters(), dense.parameters(), strict=True):
            close(full(parameter.grad), other.grad, f"{settings} {name}", 1e-10)


def case_rows_elsewhere_are_not_written_to(mesh):
    norm = fo.parallelize(nn.ModuleDict({"n": nn.LayerNorm(4)}), mesh, {"n": fo.SequenceParallel(looks_full=True)})["n"]
    own = rows(torch.ones(9, 4), mesh)
    for write in (lambda h: h.mul_(3), lambda h: h.__setitem__(0, 0.0), lambda h: torch.add(h, 1, out=h)):
        refused(lambda write=write: write(norm(own)), "would write")
    assert "LazyRows([9, 4]" in repr(norm(own))


def case_parameters_tied_to_what_the_plan_leaves_out(mesh):
    model = nn.ModuleDict({"e": nn.Embedding(12, 4), "h": nn.Linear(4, 12, bias=False), "s": nn.PReLU()})
    model["h"].weight = model["e"].weight
    plan = {"e": fo.VocabParallelEmbedding(), "s": fo.SequenceParallel()}
    refused_plan(model, mesh, plan, "h.weight", "tied to", "e.weight")
    model["h"].scale = nn.Parameter(torch.tensor(2.0))
    refused_plan(model, mesh, plan, "h.weight", "tied to")
    scaled = nn.ModuleDict({"a": nn.Module()})
    scaled["a"].scale = nn.Parameter(torch.tensor(2.0))
    fo.parallelize(scaled, mesh, {"a": fo.Replicated()})


def case_ranks_with_different_styles_are_told(mesh):
    if mesh.size() > 1:
        style = fo.SequenceParallel() if mesh.get_local_rank() else fo.Replicated()
        refused_plan(Block(), mesh, BLOCK | {"norm": style}, "disagree")


def case_compiled_models(mesh):
    if mesh.size() != 2:
        return
    ids, labels = tokens()
    for attention in (None, "query_split", "ulysses"):
        model = fo.parallelize(made(llama, dtype=torch.float32), mesh, attention=attention)
        want = model(input_ids=ids, labels=labels).loss
        found = torch.compile(model, backend="eager")(input_ids=ids, labels=labels).loss
        close(found, want, f"{attention}: loss", 1e-5)


def case_attention_that_is_not_cut_is_told(mesh):
    ids, _ = tokens()
    model = fo.parallelize(made(lambda: llama(attn_implementation="eager")), mesh, attention="query_split")
    with pytest.warns(UserWarning, match="does not call"):
        model(input_ids=ids)
    taken = fo.parallelize(Reading().double(), mesh, READING, attention="query_split", overlap=fo.Overlap(strict=True))
    taken(rows(torch.randn(2, 9, 24, dtype=torch.float64), mesh))


class Odd(nn.Module):
    """No MLP of the usual kind, though its children look like one."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, 12), nn.Linear(12, 8), nn.GELU()
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.drop(x))))


def case_a_fused_mlp_takes_the_place_of_an_mlp_only(mesh):
    style = fo.FusedMLP("up", "down", None)
    refused_plan(nn.ModuleDict({"m": Odd()}), mesh, {"m": style}, "m", "does not compute down(act(up(x)))")
    refused_plan(nn.ModuleDict({"m": Odd(0.5)}), mesh, {"m": style}, "drop", "left out")
    model = made(llama)
    usual = type(model.model.layers[1].mlp)
    doubled = type("Doubled", (usual,), {"forward": lambda self, x: 2 * usual.forward(self, x)})
    model.model.layers[1].mlp.__class__ = doubled
    refused_plan(
        model, mesh, "auto", "model.layers.1.mlp", "does not compute down_proj(act(gate_proj(x)) * up_proj(x))"
    )


def case_modules_in_another_order_are_told(mesh):
    if mesh.size() == 1:
        return
    pair = nn.ModuleDict({"a": Block(), "b": Block()}).double()
    fo.parallelize(pair, mesh, {f"*.{name}": style for name, style in BLOCK.items()})
    x = rows(torch.randn(9, 16, dtype=torch.float64), mesh)
    refused(lambda: pair["a" if mesh.get_local_rank() else "b"](x), "disagree", "in a.up", "in b.up")


def case_saved_as_transformers_does(mesh):
    """Dense, under the model's own names, fused weights whole: loaded by one process as if nothing had happened."""
    for build, kind in ((lambda: llama(tie_word_embeddings=True), hf.LlamaForCausalLM), (gpt2, hf.GPT2LMHeadModel)):
        dense = made(build, dtype=torch.float32)
        model = fo.parallelize(copy.deepcopy(dense), mesh)
        state = fo.full_state_dict(model)
        assert state.keys() == dense.state_dict().keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in dense.state_dict().items())
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder, group=mesh.get_group(), group_src=0)
        model.save_pretrained(folder[0])
        dist.barrier(group=mesh.get_group())
        again = kind.from_pretrained(folder[0])
        assert again.config.architectures == [kind.__name__]
        ids, _ = tokens()
        with torch.no_grad():
            close(again(input_ids=ids).logits, dense(input_ids=ids).logits, "logits", 1e-5)
