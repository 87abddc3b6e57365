"""What must hold of parallelized models, on any number of ranks: see model_ranks.py."""

import copy

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import nn

import flashoverlap.torch as fo

VOCAB, BATCH, SEQ = 67, 2, 11  # that no number of ranks divides
SIZES = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 12}
LLAMA = {**SIZES, "intermediate_size": 52, "num_key_value_heads": 12, "head_dim": 4, "max_position_embeddings": 64}
HEADED = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama(**changes):
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**LLAMA, **changes}))


def gpt2(**changes):
    sizes = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 12, "n_positions": 64, **HEADED}
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**{**sizes, **drops, **changes}))


MODELS = {
    "llama": llama,
    "grouped": lambda: llama(num_key_value_heads=4 if dist.get_world_size() != 3 else 3),
    "two kv heads": lambda: llama(num_key_value_heads=2 if dist.get_world_size() != 3 else 1),
    "tied": lambda: llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "one kv head": lambda: llama(num_key_value_heads=1),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**LLAMA, sliding_window=4)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**LLAMA, use_sliding_window=False)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**LLAMA)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**LLAMA)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**LLAMA, query_pre_attn_scalar=8, sliding_window=4)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(
            **LLAMA, query_pre_attn_scalar=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
        )
    ),
    "gpt2": gpt2,
}


def made(build, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = build().to(dtype)
    with torch.no_grad():  # norms and biases begin as ones and zeros, which hide mistakes
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.train()


def tokens(seq=SEQ, batch=BATCH, seed=1):
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (batch, seq), generator=random)
    labels = ids.clone()
    labels[0, : seq // 2] = -100
    return ids, labels


def full(parameter):
    """A parameter's or gradient's whole value."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def gradients(model):
    """Full gradients by their names in the dense model."""
    found, parts = {}, {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        owner, _, last = name.rpartition(".")
        if last.isdecimal() and isinstance(model.get_submodule(owner), nn.ParameterList):
            parts.setdefault(owner, []).append(full(parameter.grad))
        else:
            found[name] = full(parameter.grad)
    for name, each in parts.items():
        found[name] = torch.cat(each, dim=each[0].dim() - 1)
    return found


def close(found, want, what, tolerance=1e-10):
    torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def dense_loss(model, ids, labels, **more):
    """In the dtype of the logits, where transformers' own takes them as float32."""
    logits = model(input_ids=ids, **more).logits
    return logits, nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


# transformers' norms and rotary embeddings compute in float32 whatever comes in
def agree_with_dense(mesh, build, tolerance=1e-6, seq=SEQ, **settings):
    dense = made(build)
    model = fo.parallelize(copy.deepcopy(dense), mesh, **settings)
    ids, labels = tokens(seq)
    logits, loss = dense_loss(dense, ids, labels)
    out = model(input_ids=ids, labels=labels)
    close(out.loss, loss, "loss", tolerance)
    close(full(out.logits), logits, "logits", tolerance)
    loss.backward()
    out.loss.backward()
    found = gradients(model)
    assert found.keys() == {name for name, _ in dense.named_parameters()}
    for name, parameter in dense.named_parameters():
        close(found[name], parameter.grad, name, tolerance)
    with torch.no_grad():
        close(model(input_ids=ids).logits, logits, "logits without labels", tolerance)


def models(mesh):
    """All, or those that differ by how many ranks there are."""
    few = ("llama", "tied", "two kv heads", "one kv head", "gpt2")
    return {name: MODELS[name] for name in (MODELS if mesh.size() == 2 else few)}


def case_models_with_sequence_parallel(mesh):
    for name, build in models(mesh).items():
        try:
            agree_with_dense(mesh, build, sequence_parallel=True)
        except Exception as error:
            raise AssertionError(name) from error


def case_models_without_sequence_parallel(mesh):
    for name, build in models(mesh).items():
        try:
            agree_with_dense(mesh, build, sequence_parallel=False)
        except Exception as error:
            raise AssertionError(name) from error


# --- training ---------------------------------------------------------------------------------------------------------


def steps(model, optimizer, count, clip=0.5, batch=BATCH):
    losses = []
    for step in range(count):
        ids, labels = tokens(seed=step, batch=batch)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def replicated_alike(model, mesh):
    """Parameters that are whole on every rank are bitwise equal on all."""
    count = 0
    for name, parameter in model.named_parameters():
        if parameter.placements[0].is_replicate():
            here = parameter.to_local().detach().contiguous()
            everywhere = [torch.empty_like(here) for _ in range(mesh.size())]
            dist.all_gather(everywhere, here, group=mesh.get_group())
            assert all(torch.equal(here, other) for other in everywhere), name
            count += 1
    assert count


def case_training_gives_the_losses_of_one_process_and_replicas_stay_equal(mesh):
    for sequence_parallel in (True, False):
        dense = made(lambda: llama(num_key_value_heads=1), dtype=torch.float32)
        model = fo.parallelize(copy.deepcopy(dense), mesh, sequence_parallel=sequence_parallel)
        want = steps(dense, torch.optim.AdamW(dense.parameters(), lr=1e-3), 12)
        found = steps(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 12)
        close(torch.tensor(found), torch.tensor(want), "losses", 1e-5)
        replicated_alike(model, mesh)


def case_every_mode_gives_the_same_losses(mesh):
    dense = made(llama, dtype=torch.float32)
    want = None
    for overlap in (fo.Overlap("off"), fo.Overlap("flash", splits=2), fo.Overlap("slice"), fo.Overlap("collective")):
        model = fo.parallelize(copy.deepcopy(dense), mesh, overlap=overlap)
        found = torch.tensor(steps(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 6))
        want = found if want is None else want
        close(found, want, str(overlap), 1e-5)


def case_accumulation_adds_gradients(mesh):
    dense = made(llama)
    model = fo.parallelize(copy.deepcopy(dense), mesh)
    for seed in range(3):
        ids, labels = tokens(seed=seed)
        dense_loss(dense, ids, labels)[1].backward()
        model(input_ids=ids, labels=labels).loss.backward()
    found = gradients(model)
    for name, parameter in dense.named_parameters():
        close(found[name], parameter.grad, name, 1e-6)


def case_frozen_parameters_get_no_gradient(mesh):
    dense = made(llama)
    for name, parameter in dense.named_parameters():
        parameter.requires_grad_("mlp" in name or "q_proj" in name)
    model = fo.parallelize(copy.deepcopy(dense), mesh)
    ids, labels = tokens()
    dense_loss(dense, ids, labels)[1].backward()
    model(input_ids=ids, labels=labels).loss.backward()
    for (name, parameter), (_, want) in zip(model.named_parameters(), dense.named_parameters(), strict=True):
        assert (parameter.grad is None) == (want.grad is None), name
        if want.grad is not None:
            close(full(parameter.grad), want.grad, name, 1e-6)


def case_activation_checkpointing_changes_nothing(mesh):
    for reentrant in (False, True):
        dense = made(llama)
        model = fo.parallelize(copy.deepcopy(dense), mesh)
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        ids, labels = tokens()
        dense_loss(dense, ids, labels)[1].backward()
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
        found = gradients(model)
        for name, parameter in dense.named_parameters():
            close(found[name], parameter.grad, name, 1e-6)


def case_half_precision_and_autocast(mesh):
    dense = made(llama, dtype=torch.float32)
    ids, labels = tokens()
    want = dense_loss(dense, ids, labels)[1]
    model = fo.parallelize(copy.deepcopy(dense), mesh)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(input_ids=ids, labels=labels)
    assert abs(out.loss - want) < 0.05
    out.loss.backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    model = fo.parallelize(copy.deepcopy(dense).bfloat16(), mesh)
    out = model(input_ids=ids, labels=labels)
    assert abs(out.loss - want) < 0.1
    out.loss.backward()
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in model.parameters())


# --- inputs -----------------------------------------------------------------------------------------------------------


def case_padding_positions_and_lengths(mesh):
    dense = made(llama)
    for sequence_parallel in (True, False):
        model = fo.parallelize(copy.deepcopy(dense), mesh, sequence_parallel=sequence_parallel)
        for seq in (1, 2, 3, 16):
            ids, _ = tokens(seq)
            mask = torch.ones_like(ids)
            mask[0, : seq // 2] = 0
            positions = torch.arange(seq).flip(0)[None].expand(BATCH, -1)
            for more in (
                {"attention_mask": mask},
                {"position_ids": positions},
                {"attention_mask": mask, "position_ids": positions},
            ):
                with torch.no_grad():
                    want, found = dense(input_ids=ids, **more).logits, model(input_ids=ids, **more).logits
                valid = more.get("attention_mask", torch.ones_like(ids)).bool()
                close(found[valid], want[valid], f"{seq} {list(more)}", 1e-6)


def case_eager_attention_and_embeddings_given(mesh):
    for sequence_parallel in (True, False):
        dense = made(lambda: llama(attn_implementation="eager"))
        model = fo.parallelize(copy.deepcopy(dense), mesh, sequence_parallel=sequence_parallel)
        ids, _ = tokens()
        embeds = dense.model.embed_tokens(ids).detach()
        with torch.no_grad():
            close(model(inputs_embeds=embeds).logits, dense(input_ids=ids).logits, "inputs_embeds", 1e-6)
            kept = model(input_ids=ids, logits_to_keep=3).logits
            close(kept, dense(input_ids=ids).logits[:, -3:], "logits_to_keep", 1e-6)
            got = model(input_ids=ids, return_dict=False)[0]
            close(got, dense(input_ids=ids).logits, "tuple", 1e-6)
            hidden = model.model(input_ids=ids).last_hidden_state
            assert hidden.shape == (BATCH, SEQ, 48)
            close(hidden * 1.0, dense.model(input_ids=ids).last_hidden_state, "last hidden state", 1e-6)


def case_generation_by_transformers(mesh):
    for build in (llama, gpt2):
        dense = made(build, dtype=torch.float32).eval()
        ids, _ = tokens(5)
        settings = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        want = dense.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        for sequence_parallel in (True, False):
            model = fo.parallelize(copy.deepcopy(dense), mesh, sequence_parallel=sequence_parallel)
            assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **settings), want)


def refused(call, *words):
    with pytest.raises((ValueError, TypeError, IndexError, RuntimeError)) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value


def case_ranks_with_different_or_bad_tokens_are_told(mesh):
    model = fo.parallelize(made(llama), mesh)
    ids, labels = tokens()
    if mesh.size() > 1:
        refused(lambda: model(input_ids=(ids + (mesh.get_local_rank() == 1)) % VOCAB), "digest", "same ids")
        wrong = labels.masked_fill(labels == labels.max(), mesh.get_local_rank())
        refused(lambda: model(input_ids=ids, labels=wrong), "label")
    bad = ids.clone()
    bad[0, 0] = VOCAB
    refused(lambda: model(input_ids=bad), str(VOCAB))
    assert torch.isfinite(model(input_ids=ids, labels=labels).loss)


def case_no_valid_token_is_finite(mesh):
    model = fo.parallelize(made(llama), mesh)
    ids, labels = tokens()
    loss = model(input_ids=ids, labels=torch.full_like(labels, -100)).loss
    loss.backward()
    assert loss == 0.0
    assert all(bool((full(parameter.grad) == 0).all()) for parameter in model.parameters())


def case_attention_cut_by_queries(mesh):
    every = ("llama", "two kv heads", "mistral", "qwen3", "gemma", "gemma3", "gpt2")
    for build in every if mesh.size() == 2 else every[:2]:
        fo.report().clear()
        agree_with_dense(mesh, MODELS[build], attention="query_split")
        assert any(record.op == "attention_reduce_scatter backward" for record in fo.report()), build
    agree_with_dense(mesh, llama, seq=2, attention="query_split", overlap=fo.Overlap("flash", splits=3))
    refused(
        lambda: fo.parallelize(made(llama), mesh, sequence_parallel=False, attention="query_split"), "sequence_parallel"
    )


def case_attention_cut_by_queries_with_dropout(mesh):
    """Which is that of the uncut attention: the same seeds drop the same, recomputed or not, read by whomever."""
    ids, labels = tokens()
    strict = fo.Overlap(strict=True)
    model = fo.parallelize(made(lambda: gpt2(attn_pdrop=0.5)), mesh, attention="query_split", overlap=strict)
    found = []
    for checkpointing in (None, False, True):
        if checkpointing is not None:
            model.activation_checkpointing_enable({"use_reentrant": checkpointing})
        for read in (False, True):
            hooks = [
                layer.attn.c_proj.register_forward_pre_hook(lambda module, args: (args[0] * 1.0,))
                for layer in model.transformer.h
                if read
            ]
            torch.manual_seed(5 + mesh.get_local_rank())
            fo.report().clear()
            model.zero_grad()
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
            loss.backward()
            found.append((loss.detach(), gradients(model)))
            assert any(record.op == "attention_reduce_scatter backward" for record in fo.report()) is not read
            for hook in hooks:
                hook.remove()
    for loss, gradient in found[1:]:
        close(loss, found[0][0], "loss", 1e-10)
        for name, each in found[0][1].items():
            close(gradient[name], each, name, 1e-9)
    torch.manual_seed(6 + mesh.get_local_rank())
    assert not torch.allclose(model(input_ids=ids, labels=labels, use_cache=False).loss, found[0][0])
