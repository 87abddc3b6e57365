"""What plans do to modules of one's own, what they refuse, and what becomes of parameters: see model_ranks.py."""

import copy
import pickle
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import flashoverlap.torch as fo
from model_cases import VOCAB, close, full, gpt2, gradients, llama, made, refused, replicated_alike, tokens


class Block(nn.Module):
    """norm -> up -> gelu -> down with biases, around a residual."""

    def __init__(self, hidden=16, ffn=24):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


BLOCK = {"norm": fo.SequenceParallel(), "up": fo.ColumnParallel(), "down": fo.RowParallel()}


def rows(x, mesh, dim=-2):
    return x.tensor_split(mesh.size(), dim)[mesh.get_local_rank()]


def run_block(dense, model, mesh, sequence_parallel=True, shape=(2, 9, 16), tolerance=1e-10):
    """One pass of both; the input's rows are sharded by hand."""
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mine = (rows(x, mesh) if sequence_parallel else x).clone().requires_grad_()
    whole = x.clone().requires_grad_()
    want, found = dense(whole), model(mine)
    part = (lambda t: rows(t, mesh)) if sequence_parallel else (lambda t: t)
    assert found.shape == part(want).shape
    close(found, part(want), "output", tolerance)
    seed = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    want.backward(seed)
    found.backward(part(seed))
    close(mine.grad, part(whole.grad), "gradient of the input", tolerance)
    for (name, parameter), other in zip(model.named_parameters(), dense.parameters(), strict=True):
        if other.requires_grad:
            close(full(parameter.grad), other.grad, name, tolerance)


def case_modules_of_ones_own(mesh):
    for sequence_parallel in (True, False):
        for shape in ((2, 9, 16), (7, 16), (1, 2, 16)):
            dense = Block().double()
            model = fo.parallelize(copy.deepcopy(dense), mesh, BLOCK, sequence_parallel=sequence_parallel)
            run_block(dense, model, mesh, sequence_parallel, shape)
    dense = nn.Sequential(nn.Linear(16, 21), nn.ReLU(), nn.Linear(21, 16)).double()
    model = fo.parallelize(copy.deepcopy(dense), mesh, {"0": fo.ColumnParallel(), "2": fo.RowParallel()})
    assert model[0].weight.placements == (Shard(0),)
    assert model[2].weight.placements == (Shard(1),)
    run_block(dense, model, mesh)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def case_three_adam_steps_keep_replicas_equal(mesh):
    dense = Stack().double()
    model = fo.parallelize(copy.deepcopy(dense), mesh, {f"layers.*.{name}": style for name, style in BLOCK.items()})
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (dense, model)]
    for _ in range(3):
        for each, optimizer, here in zip((dense, model), optimizers, (x, rows(x, mesh)), strict=True):
            optimizer.zero_grad()
            each(here).pow(2).sum().backward()
            optimizer.step()
    for (name, parameter), want in zip(model.named_parameters(), dense.parameters(), strict=True):
        close(full(parameter), want, name, 1e-9)
    replicated_alike(model, mesh)


# --- refused, and nothing changed -------------------------------------------------------------------------------------


def refused_plan(model, mesh, plan, *words, **settings):
    before = [(name, type(module)) for name, module in model.named_modules()]
    refused(lambda: fo.parallelize(model, mesh, plan, **settings), *words)
    assert before == [(name, type(module)) for name, module in model.named_modules()]
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def case_plans_that_cannot_work(mesh):
    stack, n = Stack(), mesh.size()
    refused(lambda: fo.parallelize(stack, mesh.get_group(), {}), "DeviceMesh", "ProcessGroup")
    if n == 4:
        refused(lambda: fo.parallelize(stack, init_device_mesh("cpu", (2, 2)), {}), "2 dimensions")
    good = {f"layers.*.{name}": style for name, style in BLOCK.items()}
    refused_plan(stack, mesh, good | {"layers.*.downn": fo.RowParallel()}, "layers.*.downn", "nearest")
    refused_plan(stack, mesh, good | {"blocks.*.up": fo.RowParallel()}, "blocks.*.up")
    refused_plan(stack, mesh, good | {"layers.0.up": fo.ColumnParallel()}, "layers.0.up", "two patterns")
    refused_plan(stack, mesh, {}, "empty")
    refused_plan(stack, mesh, "llama", "llama", "auto")
    refused_plan(stack, mesh, "auto", "llama", "gpt2", "Stack")
    refused_plan(stack, mesh, None, "NoneType")
    refused_plan(stack, mesh, {"": fo.ColumnParallel()}, "Stack", "nn.Linear")
    refused_plan(stack, mesh, {"layers.*": fo.RowParallel()}, "layers.0", "Block")
    refused_plan(stack, mesh, good | {"layers.*.norm": fo.ColumnParallel()}, "LayerNorm")
    refused_plan(stack, mesh, good | {"layers.*.norm": "rows"}, "rows")
    refused_plan(
        stack, mesh, {name: style for name, style in good.items() if "norm" not in name}, "layers.0.norm.weight"
    )
    refused_plan(stack, mesh, good, "query", attention="query")
    refused_plan(stack, mesh, good, "sequence_parallel", sequence_parallel=1)
    refused_plan(stack, mesh, good, "Overlap", overlap="flash")
    refused_plan(nn.ModuleDict({"qkv": nn.Linear(4, 12)}), mesh, {"qkv": fo.ColumnParallel()}, "parts")
    refused_plan(nn.ModuleDict({"up": nn.Linear(4, 12)}), mesh, {"up": fo.ColumnParallel((4, 4))}, "8", "12")
    refused_plan(
        nn.ModuleDict({"e": nn.Embedding(12, 4, max_norm=1.0)}), mesh, {"e": fo.VocabParallelEmbedding()}, "max_norm"
    )
    if n > 1:
        refused_plan(nn.ModuleDict({"up": nn.Linear(4, n - 1)}), mesh, {"up": fo.ColumnParallel()}, str(n - 1), str(n))
        refused_plan(
            llama(num_attention_heads=1, num_key_value_heads=1, head_dim=48), mesh, "auto", "1 query heads", str(n)
        )
        mine = good if mesh.get_local_rank() else good | {"layers.*.downn": fo.RowParallel()}
        refused_plan(stack, mesh, mine, "downn")
    if n == 4:
        three = {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 4}
        refused_plan(llama(**three), mesh, "auto", "3 key/value heads", "4 ranks")
    tied = nn.ModuleDict({"a": nn.Linear(12, 12, bias=False), "b": nn.Linear(12, 12, bias=False)})
    tied["b"].weight = tied["a"].weight
    refused_plan(tied, mesh, {"a": fo.ColumnParallel(), "b": fo.RowParallel()}, "tied")
    fo.parallelize(stack, mesh, good)
    refused(lambda: fo.parallelize(stack, mesh, good), "already")
    refused(lambda: fo.parallelize(stack.layers[0], mesh, BLOCK), "already")


def case_ranks_with_different_plans_are_told(mesh):
    if mesh.size() == 1:
        return
    model = Block()
    settings = {"sequence_parallel": mesh.get_local_rank() == 0}
    refused_plan(model, mesh, BLOCK, "disagree", **settings)
    refused_plan(Block(ffn=24 if mesh.get_local_rank() else 48), mesh, BLOCK, "disagree")
    run_block(copy.deepcopy(model.double()), fo.parallelize(model.double(), mesh, BLOCK), mesh)


# --- parameters -------------------------------------------------------------------------------------------------------


def case_seeds_do_not_matter(mesh):
    torch.manual_seed(100 + mesh.get_local_rank())
    dense = Stack()
    first = [parameter.detach().clone() for parameter in dense.parameters()]
    for parameter in first:
        dist.broadcast(parameter, group=mesh.get_group(), group_src=0)
    model = fo.parallelize(dense, mesh, {f"layers.*.{name}": style for name, style in BLOCK.items()})
    for parameter, want in zip(model.parameters(), first, strict=True):
        assert torch.equal(full(parameter), want)
    replicated_alike(model, mesh)


def case_copies_and_pickles(mesh):
    dense = Block().double()
    model = fo.parallelize(copy.deepcopy(dense), mesh, BLOCK)
    ema = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    run_block(dense, ema, mesh)
    assert not any(bool(full(parameter).any()) for parameter in model.parameters())
    refused(lambda: pickle.dumps(model), "state_dict")
    assert list(ema.state_dict()) == list(dense.state_dict())
    model.load_state_dict(ema.state_dict())
    dense.zero_grad()
    run_block(dense, model, mesh)
    language = copy.deepcopy(fo.parallelize(made(llama), mesh))
    ids, labels = tokens()
    language(input_ids=ids, labels=labels).loss.backward()
    assert isinstance(language, type(made(llama)))


def case_fused_weights_are_cut_part_by_part(mesh):
    n, rank = mesh.size(), mesh.get_local_rank()

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(4, 12 * n)  # as many key/value features as half the query's
            self.out = nn.Linear(6 * n, 4)
            self.parts = (6 * n, 3 * n, 3 * n)

        def forward(self, x):
            q, k, v = self.qkv(x).split(self.parts, -1)
            return self.out(q * torch.cat((k, v), -1).sigmoid())

    dense = Fused().double()
    model = copy.deepcopy(dense)
    plan = {"qkv": fo.ColumnParallel(parts=dense.parts), "out": fo.RowParallel()}
    fo.parallelize(model, mesh, plan)
    here = model.qkv.shard("weight")
    want = torch.cat([part.chunk(n)[rank] for part in dense.qkv.weight.split(dense.parts)])
    assert torch.equal(here, want)
    numbers = nn.ModuleDict({"gate_up": nn.Linear(2, 6 * n, bias=False)})
    fo.parallelize(numbers, mesh, {"gate_up": fo.ColumnParallel(parts=(3 * n, 3 * n))})
    assert [tuple(part.shape) for part in numbers["gate_up"].weight] == [(3 * n, 2)] * 2


def saved(model, optimizer, folder, load=False):
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if load:
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    else:
        dcp.save(states, checkpoint_id=folder)


def case_checkpoints_of_uneven_shards_reload_elsewhere(mesh):
    """Saved on all ranks, loaded on the first ones: full sizes, the same bits."""
    here = [tempfile.mkdtemp()]
    dist.broadcast_object_list(here, src=0, group=mesh.get_group())
    for build in (lambda: llama(tie_word_embeddings=True), gpt2):
        folder = f"{here[0]}/{build().config.model_type}"
        model = fo.parallelize(made(build), mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        ids, labels = tokens()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        saved(model, optimizer, folder)
        want = {name: full(parameter).clone() for name, parameter in model.named_parameters()}
        moments = {name: full(optimizer.state[p]["exp_avg"]).clone() for name, p in model.named_parameters()}
        loss = model(input_ids=ids, labels=labels).loss
        for fewer in range(1, mesh.size()):
            group = dist.new_group(list(range(fewer)))
            if mesh.get_local_rank() < fewer:
                small = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
                if 12 % fewer == 0:
                    other = fo.parallelize(made(build, seed=9), small)
                    again = torch.optim.AdamW(other.parameters())
                    states = dict(zip(("model", "optimizer"), get_state_dict(other, again), strict=True))
                    dcp.load(states, checkpoint_id=folder, process_group=group)
                    set_state_dict(other, again, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
                    for name, parameter in other.named_parameters():
                        assert torch.equal(full(parameter), want[name]), name
                        assert torch.equal(full(again.state[parameter]["exp_avg"]), moments[name]), name
                    assert other.model.embed_tokens.weight.shape[0] == VOCAB if hasattr(other, "model") else True
                    close(other(input_ids=ids, labels=labels).loss, loss, "loss", 1e-6)
            dist.barrier(group=mesh.get_group())


def case_meta_models_are_sharded_before_they_have_values(mesh):
    with torch.device("meta"):
        model = Stack()
    fo.parallelize(model, mesh, {f"layers.*.{name}": style for name, style in BLOCK.items()})
    model.to_empty(device="cpu")
    dense = Stack()
    for parameter, want in zip(model.parameters(), dense.parameters(), strict=True):
        assert parameter.shape == want.shape
        assert parameter.to_local().numel() <= want.numel()
    assert isinstance(model.layers[0].up.weight, DTensor)


# --- dropout ----------------------------------------------------------------------------------------------------------


def everywhere(tensor, mesh):
    found = [torch.empty_like(tensor) for _ in range(mesh.size())]
    dist.all_gather(found, tensor.contiguous(), group=mesh.get_group())
    return found


def case_dropout_of_parts_differs_and_of_replicas_does_not(mesh):
    class Dropping(Block):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(torch.ones_like(x)) + 0.0 * super().forward(x)

    for sequence_parallel in (True, False):
        for seed in (0, 7):
            torch.manual_seed(seed)
            model = fo.parallelize(Dropping(), mesh, BLOCK, sequence_parallel=sequence_parallel)
            masks = everywhere(model(torch.ones(64, 16))[: 64 // mesh.size()], mesh)
            for other in masks[1:]:
                assert torch.equal(masks[0], other) is not sequence_parallel
    x = torch.ones(8, 16, requires_grad=True)
    dropping = fo.parallelize(nn.ModuleDict({"drop": nn.Dropout(0.5), **dict(Block().named_children())}), mesh, BLOCK)
    out = torch.utils.checkpoint.checkpoint(lambda x: dropping["drop"](x * 1.0).pow(2), x, use_reentrant=False)
    kept = out.detach().clone()
    out.sum().backward()
    assert torch.equal(x.grad, 2 * kept)  # of masks of zeros and twos; another mask would give other zeros


def case_dropout_in_attention(mesh):
    """Recomputed with the same masks, and the replicas of what is not sharded stay equal."""
    for sequence_parallel in (True, False):
        model = fo.parallelize(
            made(lambda: gpt2(attn_pdrop=0.3, resid_pdrop=0.2, embd_pdrop=0.1)),
            mesh,
            sequence_parallel=sequence_parallel,
        )
        ids, labels = tokens()
        found = []
        for checkpointing in (False, True):
            if checkpointing:
                model.activation_checkpointing_enable({"use_reentrant": False})
            torch.manual_seed(5)
            model.zero_grad()
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
            loss.backward()
            found.append((loss.detach(), gradients(model)))
        assert torch.equal(found[0][0], found[1][0])
        for name, gradient in found[0][1].items():
            close(found[1][1][name], gradient, name, 1e-9)
        losses = everywhere(found[0][0][None], mesh)
        assert all(torch.equal(losses[0], other) for other in losses)


# --- adapters, other axes, the report ---------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A linear with a low-rank adapter."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Linear(inputs, 4, bias=False)
        self.b = nn.Linear(4, outputs, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def case_adapters_by_plan(mesh):
    dense = nn.Sequential(Adapted(16, 24), nn.GELU(), Adapted(24, 16)).double()
    plan = {"0.base": fo.ColumnParallel(), "0.a": fo.SequenceParallel(), "0.b": fo.ColumnParallel()}
    plan |= {"2.base": fo.RowParallel(), "2.a": fo.RowParallel(), "2.b": fo.SequenceParallel()}
    for sequence_parallel in (True, False):
        model = fo.parallelize(copy.deepcopy(dense), mesh, plan, sequence_parallel=sequence_parallel)
        run_block(copy.deepcopy(dense), model, mesh, sequence_parallel)
    refused_plan(
        copy.deepcopy(dense), mesh, {"0": fo.ColumnParallel(), "2": fo.RowParallel()}, "Adapted", "inner linears"
    )
    # an adapter put around a linear that is parallel already does not fit, and says so
    model = fo.parallelize(
        nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)).double(),
        mesh,
        {"0": fo.ColumnParallel(), "2": fo.RowParallel()},
    )
    late = Adapted(16, 24).double()
    late.base = model[0]
    model[0] = late
    if mesh.size() > 1:
        refused(lambda: model(torch.ones(4, 16, dtype=torch.float64)), "size")


def case_fsdp2_on_another_axis(mesh):
    from torch.distributed.fsdp import fully_shard

    if mesh.size() != 4:
        return
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dense = made(llama)
    model = fo.parallelize(copy.deepcopy(dense), both["tp"])
    for part in (*model.model.layers, model.model.norm, model.model.embed_tokens, model.lm_head):
        fully_shard(part, mesh=both["dp"])
    fully_shard(model, mesh=both["dp"])
    each = both["dp"].get_local_rank()
    parts = [tokens(seed=seed) for seed in range(2)]
    sum(F.cross_entropy(dense(input_ids=i).logits[:, :-1].flatten(0, 1), t[:, 1:].flatten()) for i, t in parts).div(
        2
    ).backward()
    ids, labels = parts[each]
    model(input_ids=ids, labels=labels).loss.backward()
    found = gradients(model)
    for name, parameter in dense.named_parameters():
        close(found[name], parameter.grad, name, 1e-6)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.optim.AdamW(model.parameters()).step()


def case_the_report_names_modules(mesh):
    fo.report().clear()
    model = fo.parallelize(made(llama), mesh, overlap=fo.Overlap("flash", splits=2))
    ids, labels = tokens()
    model(input_ids=ids, labels=labels).loss.backward()
    sites = {(record.site, record.op) for record in fo.report()}
    for op in ("all_gather_linear", "all_gather_linear backward"):
        assert ("model.layers.1.self_attn", op) in sites, sites
    assert ("model.layers.0.self_attn.o_proj", "linear_reduce_scatter") in sites
    assert ("model.layers.1.mlp", "mlp backward") in sites
    assert ("lm_head", "all_gather_linear backward") in sites
    assert not any(op == "all_gather" for _, op in sites)  # nobody has read rows that are gathered piece by piece
