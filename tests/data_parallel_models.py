"""Models that make it hard, and all that may happen around a step: run by model_ranks.py as data_parallel_cases.py is."""

import copy
import random
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import flashoverlap.torch as fo
from data_parallel_cases import (
    SHARDS,
    adamw,
    apply,
    close,
    each,
    gradients,
    joint,
    loss_of,
    net,
    parallel,
    parameters,
    same_on_all_ranks,
    sgd,
    tokens,
    whole,
)


class Branches(nn.Module):
    """A layer that nobody uses, one that only some ranks use, one that is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.unused, self.some = nn.Linear(4, 5), nn.Linear(4, 4), nn.Linear(5, 5)
        self.frozen, self.last = nn.Linear(5, 5), nn.Linear(5, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x, take):
        x = self.frozen(torch.tanh(self.first(x)))
        return self.last(self.some(x) if take else x)


def branches():
    torch.manual_seed(5)
    return Branches().double()


def case_unused_skipped_and_frozen(mesh):
    rank, ranks = mesh.get_local_rank(), mesh.size()
    torch.manual_seed(1)
    x = torch.randn(ranks, 3, 4, dtype=torch.float64)
    for bucket in (0, 1 << 18):
        for shard in SHARDS:
            options = {"small_bytes": bucket, "overlap": fo.Overlap("flash")}
            reference, model = branches(), apply(branches(), mesh, mesh, shard=shard, **options)
            theirs, ours = sgd(reference.parameters()), sgd(model.parameters())
            for step, takes in enumerate([{0}, {ranks - 1}, set(range(ranks)), set(), {0}]):
                if shard == "parameters" and takes not in (set(), set(range(ranks))):
                    continue
                theirs.zero_grad()
                ours.zero_grad()
                sum(reference(x[r], r in takes).square().sum() for r in range(ranks)).div(ranks).backward()
                model(x[rank], rank in takes).square().sum().backward()
                found = gradients(model)
                close(found, gradients(reference))
                assert found["unused.weight"] is None
                assert found["frozen.weight"] is None
                assert (found["some.bias"] is None) == (not takes), (shard, step)
                theirs.step()
                ours.step()
            close(parameters(model), parameters(reference))


class Ties(nn.Module):
    """Tied weights, a module that is used twice, and a weight that is read beside its module."""

    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)  # reads the weight of a linear it never calls
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.block(torch.tanh(self.block(self.embed(tokens))))
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return self.head(x) + self.block.weight.square().sum()


def ties():
    torch.manual_seed(6)
    return Ties().double()


def case_ties_and_modules_used_twice(mesh):
    rank, ranks = mesh.get_local_rank(), mesh.size()
    inputs = torch.arange(4 * ranks).view(ranks, 1, 4) % 9
    for _, reference, model in each(mesh, ties):
        theirs, ours = sgd(reference.parameters()), sgd(model.parameters())
        for _ in range(3):
            theirs.zero_grad()
            ours.zero_grad()
            sum(reference(inputs[r]).square().sum() for r in range(ranks)).div(ranks).backward()
            model(inputs[rank]).square().sum().backward()
            close(gradients(model), gradients(reference))
            theirs.step()
            ours.step()
        close(parameters(model), parameters(reference))
        assert model.embed.weight is model.head.weight


def case_two_forwards_before_backward(mesh):
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for together in (True, False):
        for _, reference, model in each(mesh):
            for step in range(2):
                sum(joint(reference, ranks, 2 * step + index) for index in range(2)).backward()
                losses = [loss_of(model, rank, 2 * step + index) for index in range(2)]
                for loss in [sum(losses)] if together else losses:
                    loss.backward()
                close(gradients(model), gradients(reference))


def case_forwards_in_between(mesh):
    rank = mesh.get_local_rank()
    for _, reference, model in each(mesh):
        theirs, ours = sgd(reference.parameters()), sgd(model.parameters())
        for step in range(3):
            theirs.zero_grad()
            ours.zero_grad()
            joint(reference, mesh.size(), step).backward()
            loss_of(model, rank, step).backward()
            theirs.step()
            ours.step()
            reference.eval()
            model.eval()
            with torch.no_grad():
                for _ in range(2):
                    assert (model(tokens(0, step)) - reference(tokens(0, step))).abs().max() < 1e-12
            loss_of(model, rank, step)  # a graph that nobody goes back through
            reference.train()
            model.train()
        close(parameters(model), parameters(reference))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)  # the second time
        return self.last(x)


def case_activation_checkpointing(mesh):
    rank, ranks = mesh.get_local_rank(), mesh.size()
    torch.manual_seed(1)
    x = torch.randn(ranks, 3, 4, dtype=torch.float64)
    for reentrant in (False, True):

        def make(reentrant=reentrant):
            torch.manual_seed(7)
            return Checkpointed(reentrant).double()

        for _, reference, model in each(mesh, make):
            theirs, ours = sgd(reference.parameters()), sgd(model.parameters())
            for _ in range(3):
                theirs.zero_grad()
                ours.zero_grad()
                sum(reference(x[r]).square().sum() for r in range(ranks)).div(ranks).backward()
                model(x[rank]).square().sum().backward()
                close(gradients(model), gradients(reference))
                theirs.step()
                ours.step()
            close(parameters(model), parameters(reference))


def case_mixed_precision(mesh):
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for _, reference, model in each(mesh, lambda: net(torch.float32)):
        with torch.autocast("cpu", torch.bfloat16):
            joint(reference, ranks, 0).backward()
            loss = loss_of(model, rank, 0)
        loss.backward()
        close(gradients(model), gradients(reference), 0.02)
        assert all(grad.dtype == torch.float32 for grad in gradients(model).values())
    for _, reference, model in each(mesh, lambda: net(torch.bfloat16)):
        exact = copy.deepcopy(reference).double()
        joint(exact, ranks, 0).backward()
        loss_of(model, rank, 0).backward()
        close(gradients(model), gradients(exact), 0.06)
        assert all(grad.dtype == torch.bfloat16 for grad in gradients(model).values())
        same_on_all_ranks(mesh, gradients(model))


def case_an_empty_batch(mesh):
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for _, reference, model in each(mesh, lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()):
        reference.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
        inputs = [torch.ones(0 if r == ranks - 1 else 2, 3, dtype=torch.float64) * (r + 1) for r in range(ranks)]
        sum(reference(each).sum() for each in inputs).div(ranks).backward()
        model(inputs[rank]).sum().backward()
        close(gradients(model), gradients(reference))


def case_clipping_and_scaling_see_all(mesh):
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for _, reference, model in each(mesh):
        joint(reference, ranks, 0).backward()
        loss_of(model, rank, 0).backward()
        wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        total = whole(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        assert abs(total - wanted) < 1e-12 * wanted
        close(gradients(model), gradients(reference))


def load_alone(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is loaded in a single process
        dcp.load(state, checkpoint_id=folder, no_dist=True)


def case_checkpoints_reload_elsewhere(mesh):
    rank = mesh.get_local_rank()
    where = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(where, 0, group=mesh.get_group())
    for shard in SHARDS:
        model = parallel(net(), mesh, shard)
        optimizer = adamw(model.parameters())
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        folder = Path(where[0], shard)
        names = {parameter: name for name, parameter in model.named_parameters()}
        state = {f"{names[p]}.{key}": value for p, of in optimizer.state.items() for key, value in of.items()}
        dcp.save(
            {"model": model.state_dict(), "optimizer": state}, checkpoint_id=folder, process_group=mesh.get_group()
        )
        alone = net()
        load_alone({"model": alone.state_dict()}, folder)
        close(parameters(alone), parameters(model), 0.0)
        assert alone.up.weight.shape == (11, 7)
        momenta = {f"{name}.exp_avg": torch.zeros_like(p) for name, p in alone.named_parameters()}
        load_alone({"optimizer": momenta}, folder)
        close(momenta, {name: whole(state[name]) for name in momenta}, 0.0)
        dist.barrier(mesh.get_group())
        for other in SHARDS:  # onto another split
            again = parallel(net(), mesh, other)
            loss_of(again, rank, 0).backward()
            again.zero_grad()
            dcp.load({"model": again.state_dict()}, checkpoint_id=folder, process_group=mesh.get_group())
            assert (again(tokens(0, 0)) - alone(tokens(0, 0))).abs().max() < 1e-12
            again.load_state_dict({name: torch.zeros_like(value) for name, value in again.state_dict().items()})
            assert again(tokens(0, 0)).abs().max() == 0


def case_a_deep_copy_stands_alone(mesh):
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for _, reference, model in each(mesh):
        loss_of(model, rank, 0).backward()
        model.zero_grad()
        twin = copy.deepcopy(model)
        for each_model in (model, twin):
            other = copy.deepcopy(reference)
            theirs, ours = sgd(other.parameters()), sgd(each_model.parameters())
            for step in range(2):
                theirs.zero_grad()
                ours.zero_grad()
                joint(other, ranks, step).backward()
                loss_of(each_model, rank, step).backward()
                theirs.step()
                ours.step()
            close(parameters(each_model), parameters(other))


def case_an_error_in_backward(mesh):
    rank, ranks = mesh.get_local_rank(), mesh.size()

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("broken on purpose")

    for _, reference, model in each(mesh):
        loss_of(model, rank, 0).backward()
        model.zero_grad()
        last = model.norm.forward
        try:
            if rank == 0:
                model.norm.register_forward_hook(lambda module, args, out: Breaks.apply(out))
            loss_of(model, rank, 1).backward()
            raise AssertionError("nothing was raised") if rank == 0 else ArithmeticError("a peer has told")
        except (ArithmeticError, fo.PeerError):
            pass
        assert last
        model.norm._forward_hooks.clear()
        model.zero_grad()
        joint(reference, ranks, 2).backward()
        try:
            loss_of(model, rank, 2).backward()
        except fo.PeerError:  # one that was waiting when rank 0 gave up its pass
            model.zero_grad()
            loss_of(model, rank, 2).backward()
        close(gradients(model), gradients(reference))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def case_beside_tensor_parallelism(mesh):
    if mesh.size() != 4:
        return
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"*.norm": fo.SequenceParallel(), "*.up": fo.ColumnParallel(), "*.down": fo.RowParallel()}

    def make():
        torch.manual_seed(8)
        return nn.Sequential(Mlp(), Mlp()).double()

    torch.manual_seed(1)
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    ends = {"": fo.ShardedInput()} if hasattr(fo, "WholeOutput") else {}
    for shard in SHARDS[:2]:
        reference, model = make(), make()
        fo.parallelize(model, both["tp"], plan | ends, sequence_parallel=False)
        apply(model, both["dp"], both["dp"], shard=shard, small_bytes=0, overlap=fo.Overlap("flash"))
        theirs, ours = adamw(reference.parameters()), adamw(model.parameters())
        for _ in range(3):
            theirs.zero_grad()
            ours.zero_grad()
            sum(reference(x[r]).square().sum() for r in range(2)).div(2).backward()
            model(x[both["dp"].get_local_rank()]).square().sum().backward()
            close(gradients(model), gradients(reference))
            theirs.step()
            ours.step()
        close(parameters(model), parameters(reference))
        same_on_all_ranks(mesh, parameters(model))


def case_gradients_of_inputs_and_second_derivatives(mesh):
    rank, ranks = mesh.get_local_rank(), mesh.size()
    torch.manual_seed(1)
    x = torch.randn(ranks, 3, 4, dtype=torch.float64)

    def make():
        torch.manual_seed(9)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()

    def penalty(model, r):
        inputs = x[r].clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
        return grad.square().sum()

    for shard, reference, model in each(mesh, make):
        for _ in range(2):
            sum(penalty(reference, r) for r in range(ranks)).div(ranks).backward()
            penalty(model, rank).backward()
            close(gradients(model), gradients(reference))
        if shard == "none":
            found = torch.autograd.grad(model(x[rank]).square().sum(), list(model.parameters()))
            wanted = torch.autograd.grad(reference(x[rank]).square().sum(), list(reference.parameters()))
            close(dict(enumerate(found)), dict(enumerate(wanted)))


def case_weights_in_other_layouts(mesh):
    rank, ranks = mesh.get_local_rank(), mesh.size()
    x = torch.ones(ranks, 2, 3, 5, 5, dtype=torch.float64) * torch.arange(1, ranks + 1).view(-1, 1, 1, 1, 1)

    def make():
        torch.manual_seed(4)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 5)).double()
        model[0].to(memory_format=torch.channels_last)
        model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
        return model

    for _, reference, model in each(mesh, make):
        theirs, ours = sgd(reference.parameters()), sgd(model.parameters())
        for _ in range(2):
            theirs.zero_grad()
            ours.zero_grad()
            sum(reference(x[r]).square().mean() for r in range(ranks)).div(ranks).backward()
            model(x[rank]).square().mean().backward()
            theirs.step()
            ours.step()
        close(parameters(model), parameters(reference))


def case_hooks_on_a_weight_are_called(mesh):
    rank, ranks = mesh.get_local_rank(), mesh.size()
    reference, model = net(), parallel(net(), mesh, "none")
    seen = []
    model.up.weight.register_hook(lambda grad: seen.append(grad) or grad * 2)
    reference.up.weight.register_hook(lambda grad: grad * 2)
    for step in range(3):
        joint(reference, ranks, step).backward()
        loss_of(model, rank, step).backward()
    close(gradients(model), gradients(reference))
    assert len(seen) == 3


def case_refusals(mesh):
    for make, options, words in (
        (nn.Linear, {"shard": "some"}, "shard='some' is unknown"),
        (nn.Linear, {"overlap": "flash"}, "must be a flashoverlap.Overlap"),
        (lambda *size: nn.Linear(*size, device="meta"), {}, "have no values"),
        (lambda *size: parallel(nn.Linear(*size), mesh, "none"), {}, "data-parallel already"),
    ):
        model = make(3, 4)
        with pytest.raises((ValueError, TypeError), match=words):
            fo.data_parallel(model, mesh, **options)
    if mesh.size() > 1:
        with pytest.raises(ValueError, match="disagree"):
            fo.data_parallel(nn.Linear(3, 4 + mesh.get_local_rank()), mesh)


def case_ranks_are_late_and_orders_differ(mesh):
    """Twenty parameters of different sizes on late ranks, which go through two branches in orders of their own."""
    rank, ranks = mesh.get_local_rank(), mesh.size()

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.branches = nn.ModuleList(
                nn.Sequential(*(nn.Linear(size, size + 1) for size in range(3, 13))) for _ in range(2)
            )

        def forward(self, x, order):
            return sum(self.branches[at](x).square().mean() for at in order)

    def make():
        torch.manual_seed(2)
        return Two().double()

    late = random.Random(rank)
    for _, reference, model in each(mesh, make):
        theirs, ours = sgd(reference.parameters()), sgd(model.parameters())
        for step in range(6):
            torch.manual_seed(step)
            x = torch.randn(ranks, 2, 3, dtype=torch.float64)
            theirs.zero_grad()
            ours.zero_grad()
            sum(reference(x[r], (0, 1)) for r in range(ranks)).div(ranks).backward()
            time.sleep(late.random() * 0.005)
            # streamed weights are gathered in the order of forward, which must be that of all ranks
            order = (0, 1) if model.branches[0][0].weight.__class__ is DTensor or rank % 2 == 0 else (1, 0)
            model(x[rank], order).backward()
            theirs.step()
            ours.step()
        close(parameters(model), parameters(reference))
