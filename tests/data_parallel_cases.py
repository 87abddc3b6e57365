"""What every rank of a data-parallel model does, against one process on the joint batch: run by model_ranks.py."""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import flashoverlap.torch as fo
from flashoverlap import Link, Machine, Matmul
from flashoverlap.torch.data_parallel import apply

SHARDS = ("none", "gradients", "parameters")


class Net(nn.Module):
    """Odd sizes, more ranks than rows, a norm, an embedding, biases and none, and a convolution."""

    def __init__(self, rows=11):
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.norm = nn.LayerNorm(7)
        self.up = nn.Linear(7, rows)
        self.mix = nn.Conv1d(rows, rows, 3, padding=1)
        self.down = nn.Linear(rows, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens):
        x = functional.gelu(self.up(self.norm(self.embed(tokens))))
        x = self.mix(x.transpose(1, 2)).transpose(1, 2)
        return self.down(x) * self.scale


def net(dtype=torch.float64, rows=11):
    torch.manual_seed(3)
    return Net(rows).to(dtype)


def tokens(rank, step, batch=2):
    return torch.randint(0, 13, (batch, 5), generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model, rank, step):
    return model(tokens(rank, step)).pow(2).mean() * (rank + 1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parameters(model):
    return {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def gradients(model):
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: None if grad is None else whole(grad).clone() for name, grad in found.items()}


def joint(model, ranks, step, loss=loss_of):
    """The mean over ranks of the losses, in one process."""
    return sum(loss(model, rank, step) for rank in range(ranks)) / ranks


def close(found, wanted, tolerance=1e-12):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if tensor is None or found[name] is None:
            assert tensor is found[name], f"{name}: {found[name]} and not {tensor}"
            continue
        assert found[name].shape == tensor.shape, f"{name}: {found[name].shape} and not {tensor.shape}"
        difference = (found[name].double() - tensor.double()).abs().max().item() if tensor.numel() else 0.0
        assert difference <= tolerance * max(1.0, tensor.abs().max().item()), f"{name} is off by {difference}"


def same_on_all_ranks(mesh, tensors):
    for name, tensor in tensors.items():
        others = [torch.empty_like(tensor) for _ in range(mesh.size())]
        dist.all_gather(others, tensor.contiguous(), group=mesh.get_group())
        assert all(torch.equal(other, tensor) for other in others), f"{name} differs between ranks"


def parallel(model, mesh, shard, overlap=fo.Overlap("flash"), **options):  # so small a model is "off" in mode "auto"
    return apply(model, mesh, mesh, shard=shard, small_bytes=0, overlap=overlap, **options)


def settings():
    """Every shard mode in every overlap mode."""
    modes = [fo.Overlap(mode="flash", splits=2), fo.Overlap(mode="flash", pattern="ring")]
    modes += [fo.Overlap(mode=mode) for mode in ("auto", "slice", "off", "collective")]
    return itertools.product(SHARDS, modes)


def case_twenty_steps_are_those_of_one_process(mesh):
    wide, narrow = (torch.float64, 1e-12), (torch.float32, 1e-5)
    runs = [(sgd, "none", *wide), (adamw, "none", *wide), (adamw, "gradients", *wide), (adamw, "parameters", *wide)]
    runs += [(sgd, "gradients", *narrow), (sgd, "parameters", *narrow)]
    for make, shard, dtype, tolerance in runs:
        reference, model = net(dtype), parallel(net(dtype), mesh, shard)
        theirs, ours = make(reference.parameters()), make(model.parameters())
        for step in range(20):
            theirs.zero_grad()
            joint(reference, mesh.size(), step).backward()
            theirs.step()
            ours.zero_grad()
            loss_of(model, mesh.get_local_rank(), step).backward()
            if step == 0:
                close(gradients(model), gradients(reference), tolerance)
            ours.step()
        close(parameters(model), parameters(reference), tolerance)
        same_on_all_ranks(mesh, parameters(model))
        same_on_all_ranks(mesh, {"output": model(tokens(0, 0)).detach()})  # of whole values, as ranks hold them


def case_every_mode(mesh):
    for shard, overlap in settings():
        reference, model = net(), parallel(net(), mesh, shard, overlap=overlap)
        theirs, ours = adamw(reference.parameters()), adamw(model.parameters())
        for step in range(3):
            theirs.zero_grad(set_to_none=step % 2 == 0)
            joint(reference, mesh.size(), step).backward()
            theirs.step()
            ours.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, mesh.get_local_rank(), step).backward()
            ours.step()
        close(parameters(model), parameters(reference))


def case_a_record_has_all_that_its_step_has_moved(mesh):
    """Also the own pieces that leave late, as all do in one step here: none is told of as a part of the next."""
    for mode in ("off", "flash"):
        model, moved = parallel(net(), mesh, "parameters", overlap=fo.Overlap(mode)), []
        optimizer, stream = sgd(model.parameters()), model._engine.stream
        polls = {step: (lambda: None) if step == 2 else stream._poll for step in range(4)}
        for step in range(4):
            stream._poll = polls[step]
            fo.report().clear()
            loss_of(model, mesh.get_local_rank(), step).backward()
            moved.append({record.op: record.bytes for record in fo.report().records})
            optimizer.step()
            optimizer.zero_grad()
        assert moved[1] == moved[2] == moved[3], moved


def case_a_plan_changes_the_mode_between_steps(mesh):
    """What hides behind matmuls stays flash; what is through at once is off from the second step on."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for bytes_per_s, taken in ((1e5, "flash"), (1e12, "off")):
        fo.use_machine(mesh, Machine(Link(0.0, bytes_per_s), matmul=Matmul(1e6)))
        for shard in SHARDS:
            reference, model = net(), parallel(net(), mesh, shard, fo.Overlap())
            theirs, ours = adamw(reference.parameters()), adamw(model.parameters())
            for step in range(4):
                theirs.zero_grad()
                (sum(reference(tokens(r, step, 1 + r)).pow(2).mean() for r in range(ranks)) / ranks).backward()
                theirs.step()
                ours.zero_grad()
                model(tokens(rank, step, 1 + rank)).pow(2).mean().backward()
                ours.step()
            close(parameters(model), parameters(reference))
            assert model._engine.account.mode == (taken if ranks > 1 else "flash")


def each(mesh, make=net, **options):
    """For every shard mode a reference and a model of the same values."""
    for shard in SHARDS:
        yield shard, make(), parallel(make(), mesh, shard, **options)


def case_float32_and_float64(mesh):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        for _, reference, model in each(mesh, lambda dtype=dtype: net(dtype)):
            joint(reference, mesh.size(), 0).backward()
            loss_of(model, mesh.get_local_rank(), 0).backward()
            close(gradients(model), gradients(reference), tolerance)


def case_values_of_rank_0_are_taken(mesh):
    def made(rank):
        torch.manual_seed(rank)
        model = Net().double()
        model.register_buffer("count", torch.tensor(rank))
        return model

    for shard in SHARDS:
        model = parallel(made(mesh.get_local_rank()), mesh, shard)
        close(parameters(model), parameters(made(0)), 0.0)
        assert model.count == 0
        same_on_all_ranks(mesh, parameters(model))


def case_a_mean_is_no_sum(mesh):
    for divisor, wanted in ((None, 1.0), (1.0, mesh.size())):
        for shard in SHARDS:
            model = parallel(nn.Linear(3, 4, bias=False), mesh, shard, divisor=divisor)
            model(torch.full((2, 3), 0.5)).sum().backward()
            assert torch.equal(gradients(model)["weight"], torch.full((4, 3), float(wanted)))


def of_all_tokens(mesh, losses, labels):
    """What docs/data_parallel.md has instead of a mean over the own valid tokens: this rank's part of that over all."""
    count = (labels != -100).sum()
    dist.all_reduce(count, group=mesh.get_group())
    return losses * mesh.size() / count.clamp(min=1)


def case_a_mean_over_the_tokens_of_all_ranks(mesh):
    """One token with loss 4 and three with none, on two ranks, have a mean loss of 1: of cases C19."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    counts = [1, 3, 0, 2][:ranks]  # valid tokens
    x = [torch.full((4, 1), 4.0 if each == 0 else 0.0).double() for each in range(ranks)]
    valid = torch.arange(4) < counts[rank]
    labels = torch.where(valid, 0, -100)
    for shard in SHARDS:
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.ones_(model.weight)
        model = parallel(model, mesh, shard)
        loss = of_all_tokens(mesh, model(x[rank]).flatten()[valid].sum(), labels)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh.get_group())
        assert mean / ranks == 4 / sum(counts)
        assert gradients(model)["weight"] == 4 / sum(counts)


def case_valid_tokens_are_as_many_on_no_two_ranks(mesh):
    """Gradients are those of the joint batch, one rank having no valid token, or none of them."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for counts in ([3 * (ranks - 1 - each) for each in range(ranks)], [0] * ranks):
        for _, reference, model in each(mesh):
            inputs = [tokens(each, 0) for each in range(ranks)]
            labels = [torch.arange(10).view(2, 5) % 3 for _ in range(ranks)]
            for of_rank, count in zip(labels, counts, strict=True):
                of_rank.view(-1)[count:] = -100
            loss = functional.cross_entropy(
                torch.cat([reference(own) for own in inputs]).flatten(0, 1),
                torch.cat(labels).flatten(),
                reduction="sum",
            )
            (loss / max(1, sum(counts))).backward()
            logits, own = model(inputs[rank]).flatten(0, 1), labels[rank].flatten()
            of_all_tokens(mesh, functional.cross_entropy(logits, own, reduction="sum"), own).backward()
            found = gradients(model)
            assert all(bool(grad.isfinite().all()) for grad in found.values())
            close(found, gradients(reference))


def case_micro_batches_are_sent_once(mesh):
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for set_to_none, deferred in itertools.product((True, False), (True, False)):
        for shard, reference, model in each(mesh):
            fo.report().clear()
            for step in range(2):
                reference.zero_grad(set_to_none)
                model.zero_grad(set_to_none)
                for micro in range(3):
                    joint(reference, ranks, 3 * step + micro).backward()
                    if deferred and micro < 2:
                        with model.no_sync():
                            loss_of(model, rank, 3 * step + micro).backward()
                    else:
                        loss_of(model, rank, 3 * step + micro).backward()
                close(gradients(model), gradients(reference))
            sent = sum(record.bytes for record in fo.report() if record.op == "grad_reduce_scatter")
            calls = sum(record.calls for record in fo.report() if record.op == "grad_reduce_scatter")
            assert calls == (2 if deferred else 6), (shard, calls)
            assert ranks == 1 or sent > 0
            fo.report().clear()
