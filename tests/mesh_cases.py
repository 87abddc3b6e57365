"""What must hold of models that are parallelized over their sequence, and over heads and features beside it: see
model_ranks.py. On 4 ranks most of it runs on a mesh of 2 x 2."""

import copy
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import flashoverlap.torch as fo
from model_cases import (
    BATCH,
    MODELS,
    VOCAB,
    agree_with_dense,
    close,
    dense_loss,
    full,
    gpt2,
    gradients,
    llama,
    made,
    refused,
    steps,
    tokens,
)
from plan_cases import refused_plan, saved
from reading_cases import READING, Reading

ULYSSES = {"attention": "ulysses"}


def meshed(mesh):
    """2 x 2 on 4 ranks, or else the mesh itself."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("up", "tp")) if mesh.size() == 4 else mesh


def parallelized(dense, mesh, **settings):
    return fo.parallelize(copy.deepcopy(dense), mesh, **ULYSSES, **settings)


def agree(mesh, *names, **settings):
    for name in names:
        try:
            agree_with_dense(mesh, MODELS[name], **ULYSSES, **settings)
        except Exception as error:
            raise AssertionError(name) from error


def case_attention_hides_the_way_out_of_it(mesh):
    fo.report().clear()
    agree(meshed(mesh), "grouped")
    called = {record.op for record in fo.report().records if "attention" in record.op or "heads" in record.op}
    alone = {"attention_all_to_all", "attention_all_to_all backward", "rows_to_heads", "rows_to_heads backward"}
    linear = {"attention_all_to_all_linear", "attention_all_to_all_linear backward"}
    assert called == (alone if mesh.size() == 4 else linear)


@pytest.mark.filterwarnings("ignore:.*does not call torch's scaled_dot_product_attention")  # gemma2
def case_models(mesh):
    both = meshed(mesh)
    few = ("llama", "two kv heads", "gpt2")
    some = (*few, "tied", "mistral", "qwen3", "gemma")
    agree(both, *{2: MODELS, 4: some}.get(mesh.size(), few))
    if both is not mesh:
        agree(mesh, "grouped", "two kv heads")


def case_heads_that_the_ranks_do_not_divide(mesh):
    uneven = lambda: llama(num_attention_heads=6, num_key_value_heads=3, head_dim=6)  # noqa: E731
    few = lambda: llama(num_attention_heads=6, num_key_value_heads=2, head_dim=6)  # noqa: E731
    for build in (uneven, few):
        agree_with_dense(mesh, build, **ULYSSES)
    if mesh.size() > 1:
        words = ("1 query heads", f"{mesh.size()} ranks of up")
        refused_plan(llama(num_attention_heads=1, num_key_value_heads=1), mesh, "auto", *words, **ULYSSES)


def case_positions_padding_and_lengths(mesh):
    dense = made(llama)
    model = parallelized(dense, meshed(mesh))
    for seq in (1, 3, 16):
        ids, _ = tokens(seq)
        mask = torch.ones_like(ids)
        mask[0, : seq // 2] = 0
        positions = torch.arange(seq).flip(0)[None].expand(BATCH, -1)
        more = {"attention_mask": mask, "position_ids": positions}
        with torch.no_grad():
            want, found = dense(input_ids=ids, **more).logits, model(input_ids=ids, **more).logits
        close(found[mask.bool()], want[mask.bool()], f"{seq} tokens", 1e-6)


def case_a_mean_over_the_valid_tokens_of_all(mesh):
    """Of which the ranks hold different numbers, or none."""
    dense = made(llama)
    model = parallelized(dense, meshed(mesh))
    ids, labels = tokens()
    labels[:, 3:] = -100
    valid = int((labels[:, 1:] != -100).sum())
    want = dense_loss(dense, ids, labels)[1]
    out = model(input_ids=ids, labels=labels)
    close(out.loss, want, "loss", 1e-6)
    want.backward()
    out.loss.backward()
    close(gradients(model)["lm_head.weight"], dense.lm_head.weight.grad, "lm_head", 1e-6)
    none = model(input_ids=ids, labels=torch.full_like(labels, -100)).loss
    assert none == 0.0
    close(model(input_ids=ids, labels=labels, num_items_in_batch=8).loss, want * valid / 8, "num_items_in_batch", 1e-6)


def case_training_gives_the_parameters_of_one_process(mesh):
    both = meshed(mesh)
    dense = made(lambda: llama(num_key_value_heads=1, tie_word_embeddings=True), dtype=torch.float32)
    model = parallelized(dense, both)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.placements == ((Replicate(), Shard(0)) if both.ndim == 2 else (Replicate(),))
    assert weight.shape == dense.model.layers[0].mlp.up_proj.weight.shape
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (dense, model)]
    want, found = (steps(each, optimizer, 8) for each, optimizer in zip((dense, model), optimizers, strict=True))
    close(torch.tensor(found), torch.tensor(want), "losses", 1e-5)
    for (name, parameter), other in zip(model.named_parameters(), dense.parameters(), strict=True):
        close(full(parameter), other, name, 1e-4)
        here, everywhere = parameter.to_local(), [torch.empty_like(parameter.to_local()) for _ in range(2)]
        if both.ndim == 2:
            dist.all_gather(everywhere, here.contiguous(), group=both.get_group("up"))
            assert all(torch.equal(here, other) for other in everywhere), name


def case_accumulation_checkpointing_and_frozen_parameters(mesh):
    dense = made(llama)
    for name, parameter in dense.named_parameters():
        parameter.requires_grad_("k_proj" not in name)
    model = parallelized(dense, meshed(mesh))
    model.activation_checkpointing_enable({"use_reentrant": False})
    for seed in range(2):
        ids, labels = tokens(seed=seed)
        dense_loss(dense, ids, labels)[1].backward()
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
    for (name, parameter), want in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert (parameter.grad is None) == (want.grad is None), name
        if want.grad is not None:
            close(full(parameter.grad), want.grad, name, 1e-6)


def case_edges(mesh):
    dense = made(lambda: llama(attn_implementation="eager"))
    model = parallelized(dense, meshed(mesh))
    ids, labels = tokens()
    logits = dense(input_ids=ids).logits
    embeds = dense.model.embed_tokens(ids).detach()
    with pytest.warns(UserWarning, match="as attention='ulysses' asks: the model does not call"):
        given = model(inputs_embeds=embeds).logits
    close(given, logits, "inputs_embeds", 1e-6)
    close(model(input_ids=ids, logits_to_keep=3).logits, logits[:, -3:], "logits_to_keep", 1e-6)
    close(model(input_ids=ids, return_dict=False)[0], logits, "tuple", 1e-6)
    close(model(input_ids=ids, labels=labels, return_dict=False)[1] * 1, logits, "tuple with a loss", 1e-6)
    kept = model(input_ids=ids, labels=labels).logits
    assert kept.shape == logits.shape
    assert kept.here.shape[-2] < logits.shape[-2] or mesh.size() == 1
    seed = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(4))
    (kept * seed).sum().backward()  # a loss of one's own
    (logits * seed).sum().backward()
    found = gradients(model)
    for name, parameter in dense.named_parameters():
        close(found[name], parameter.grad, name, 1e-6)


def case_generation(mesh):
    dense = made(llama, dtype=torch.float32).eval()
    ids, _ = tokens(5)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    settings["attention_mask"] = torch.ones_like(ids)
    model = parallelized(dense, meshed(mesh))
    assert torch.equal(model.generate(ids, **settings), dense.generate(ids, **settings))


def case_dropout_differs_between_all_ranks(mesh):
    both = meshed(mesh)
    model = parallelized(made(lambda: gpt2(embd_pdrop=0.5)), both)
    seen = []
    model.transformer.drop.register_forward_hook(lambda module, args, out: seen.append((out == 0).flatten()))
    ids, _ = tokens(4 * mesh.size())
    model(input_ids=ids, labels=ids)
    masks = [torch.empty_like(seen[0]) for _ in range(mesh.size())]
    dist.all_gather(masks, seen[0])
    assert len({tuple(mask.tolist()) for mask in masks}) == mesh.size()


def case_whoever_reads_rows_gets_all_of_them(mesh):
    both = meshed(mesh)
    dense = Reading().double()
    model = fo.parallelize(copy.deepcopy(dense), both, READING, **ULYSSES)
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    whole, here = x.clone().requires_grad_(), x.clone().requires_grad_()
    own = here
    for size, rank in zip(both.shape, both.get_coordinate(), strict=True):
        own = own.tensor_split(size, -2)[rank]
    want, found = dense(whole), model(own)
    close(found, want, "output", 1e-10)
    want.square().sum().backward()
    found.square().sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), dense.named_parameters(), strict=True):
        if name not in ("score.weight", "score.bias"):
            close(full(parameter.grad), other[1].grad, name, 1e-10)


def case_what_cannot_work_is_refused(mesh):
    both = meshed(mesh)
    model = made(llama)
    refused_plan(model, mesh, "auto", "sequence_parallel=True", sequence_parallel=False, **ULYSSES)
    if mesh.size() == 4:
        refused_plan(model, both, "auto", "'up'", "attention='ulysses'", "mesh['tp']")
        refused_plan(model, both, "auto", "'query_split'", "attention='ulysses'", attention="query_split")
        named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        refused_plan(model, named, "auto", "2 dimensions", "('dp', 'tp')", "mesh['up', 'tp']", **ULYSSES)
        refused_plan(llama(num_attention_heads=2, num_key_value_heads=1), both, "auto", "1 query heads", **ULYSSES)
    if mesh.size() == 1:
        return
    last = dist.get_rank() == mesh.size() - 1
    refused_plan(llama(intermediate_size=48 if last else 52), both, "auto", "disagree", **ULYSSES)
    model = fo.parallelize(model, both, **ULYSSES)
    ids, labels = tokens()
    refused(lambda: model(input_ids=(ids + last) % VOCAB), "digest", "same ids")
    refused(lambda: model(input_ids=ids.masked_fill(ids == ids.max(), VOCAB if last else 1)), str(VOCAB))
    refused(lambda: model(input_ids=ids, labels=labels + last), "digest", "same labels")
    bad = labels.clone()
    bad[0, -1] = VOCAB  # a row of the last up
    refused(lambda: model(input_ids=ids, labels=bad), str(VOCAB))
    assert torch.isfinite(model(input_ids=ids, labels=labels).loss)


def case_checkpoints_reload_on_another_mesh(mesh):
    """What all ranks of up have written, 2 x 2 ranks go on with."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    dense = made(llama)
    states = []
    for number, each in enumerate((mesh, meshed(mesh))):
        model = parallelized(dense if number == 0 else made(llama, seed=9), each)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if number == 0:
            steps(model, optimizer, 2)
        saved(model, optimizer, folder[0], load=number > 0)
        state = {name: full(parameter).clone() for name, parameter in model.named_parameters()}
        moments = {name: full(optimizer.state[p]["exp_avg"]).clone() for name, p in model.named_parameters()}
        states.append((state, moments, steps(model, optimizer, 2)))
    (state, moments, losses), (again, moments_again, losses_again) = states
    for name, tensor in state.items():
        assert torch.equal(again[name], tensor), name
        assert torch.equal(moments_again[name], moments[name]), name
    close(torch.tensor(losses_again), torch.tensor(losses), "losses", 1e-6)


def case_dense_files(mesh):
    dense = made(lambda: llama(tie_word_embeddings=True))
    state = fo.full_state_dict(parallelized(dense, meshed(mesh)))
    assert state.keys() == dense.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in dense.state_dict().items())


def case_replicas_beside(mesh):
    """Over 2 x up: each replica has a sequence of its own, and gradients are means over replicas, sums over up."""
    if mesh.size() != 4:
        return
    dense = made(llama)
    ids, labels = tokens(batch=4)
    want = [dense_loss(dense, *part)[1] for part in zip(ids.chunk(2), labels.chunk(2), strict=True)]
    (sum(want) / 2).backward()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "up"))
    rank = mesh.get_local_rank("dp")
    for shard in ("none", "gradients", "parameters"):
        model = fo.data_parallel(parallelized(dense, mesh["up"]), mesh["dp"], shard=shard)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(input_ids=ids.chunk(2)[rank], labels=labels.chunk(2)[rank]).loss
        close(loss, want[rank], "loss", 1e-6)
        loss.backward()
        found = gradients(model)
        for name, parameter in dense.named_parameters():
            close(found[name], parameter.grad, f"{shard} {name}", 1e-6)
        optimizer.step()
        with torch.no_grad():
            stepped = copy.deepcopy(dense)
            for parameter, other in zip(stepped.parameters(), dense.parameters(), strict=True):
                parameter -= 0.1 * other.grad
            close(model(input_ids=ids).logits, stepped(input_ids=ids).logits, "logits after a step", 1e-6)
