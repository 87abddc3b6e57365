"""What a data-parallel model holds while gradients are on their way, and that nobody waits for ranks which leave
something out: run by model_ranks.py."""

import itertools
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import flashoverlap.torch as fo
from data_parallel_cases import SHARDS, adamw, close, gradients, parallel, parameters, same_on_all_ranks, sgd
from flashoverlap.live_bytes import LiveBytes, held
from flashoverlap.torch.data_parallel.gradients import Gradients

LAYERS = 6


class Windows:
    """What gradients had in flight, each time that another part was to leave in a pass that bounds it."""

    def __init__(self):
        self.waited, self.most = 0, 0.0  # how often there was no room; the fullest, as a share of the bound

    @contextmanager
    def seen(self):
        make_room = Gradients._make_room

        def watch(gradients, room):
            was_full = gradients._bounded and gradients._in_flight + room > gradients._most
            make_room(gradients, room)
            if gradients._bounded:
                self.waited += was_full
                self.most = max(self.most, (gradients._in_flight + room) / gradients._most)

        Gradients._make_room = watch
        try:
            yield self
        finally:
            Gradients._make_room = make_room


class Layers(nn.Module):
    """Layers of one size, of which a rank may leave some out, behind two branches, of which it may take either."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(LAYERS))

    def forward(self, x, branches=(0, 1), skipped=()):
        x = sum(self.branches[at](x) for at in branches)
        for number, layer in enumerate(self.layers):
            if number not in skipped:
                x = torch.tanh(layer(x))
        return x.square().sum()


def layers():
    torch.manual_seed(3)
    return Layers().double()


def absences(ranks):
    """For each step what ``forward`` is told on each rank: who leaves out what changes from step to step.

    A pass is bounded where the ranks were alike in the one before. So some absences come after a step of all, and
    others one after another.
    """
    last, everything = ranks - 1, [{}] * ranks

    def only(rank, **told):
        return [told if each == rank else {} for each in range(ranks)]

    every_other = tuple(range(0, LAYERS, 2))
    return [
        *[everything] * 2,
        only(0, skipped=(LAYERS - 1,)),  # which all begin with
        everything,
        only(last, skipped=(0,)),  # which all end with
        only(last // 2, skipped=every_other),
        only(0, skipped=tuple(range(LAYERS))),
        *[everything] * 2,
        [{"branches": (rank % 2,)} for rank in range(ranks)],
        everything,
        [{"branches": (rank % 2,), "skipped": (rank, LAYERS - 1 - rank)} for rank in range(ranks)],
        only(last, branches=(1,), skipped=tuple(range(1, LAYERS))),
        everything,
    ]


def case_a_full_window_and_ranks_that_leave_something_out(mesh):
    rank, ranks = mesh.get_local_rank(), mesh.size()
    flash, ring = fo.Overlap(mode="flash"), fo.Overlap(mode="flash", pattern="ring")
    settings = [(shard, flash) for shard in SHARDS]
    if ranks == 3:
        settings += [("gradients", ring), ("gradients", fo.Overlap(mode="slice"))]
    for shard, overlap in settings:
        reference, model = layers(), parallel(layers(), mesh, shard, overlap=overlap)
        theirs, ours = sgd(reference.parameters()), sgd(model.parameters())
        with Windows().seen() as windows:
            for step, told in enumerate(absences(ranks)):
                torch.manual_seed(step)
                x = torch.randn(ranks, 2, 5, dtype=torch.float64)
                theirs.zero_grad()
                ours.zero_grad()
                sum(reference(x[each], **told[each]) for each in range(ranks)).div(ranks).backward()
                loss = model(x[rank], **told[rank])
                if step % ranks == rank:
                    time.sleep(0.01)  # what the others have in flight stays there
                loss.backward()
                close(gradients(model), gradients(reference))
                theirs.step()
                ours.step()
        close(parameters(model), parameters(reference))
        same_on_all_ranks(mesh, parameters(model))
        if ranks > 1 and overlap.pattern != "ring":
            assert windows.most <= 1.0, f"{shard} {overlap}: {windows.most} of what there is room for"
            waited = [0] * ranks
            dist.all_gather_object(waited, windows.waited, group=mesh.get_group())
            # with "parameters" it is weights that the others wait for
            assert sum(waited) or shard == "parameters", f"{shard} {overlap}: the window was never full"


# --- bytes ------------------------------------------------------------------------------------------------------------


def stack(width):
    torch.manual_seed(0)
    return nn.Sequential(
        *(module for _ in range(LAYERS) for module in (nn.Linear(width, width, bias=False), nn.ReLU()))
    )


def live(model, optimizer, loss, more=()):
    """Bytes that are held between steps, and the most that were live at once in two steps."""

    def step():
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    with LiveBytes([*held(model, optimizer), *more]) as bytes:
        before = bytes.peak
        step()
        step()
    return before, bytes.peak


def leaves(model):
    return [member.leaf for unit in model._engine.units for member in unit.members]


def case_bytes_in_flight_are_bounded(mesh):
    """Above what is kept: gradients of the own rows, what is in flight, and with "parameters" two weights."""
    ranks, width, rows = mesh.size(), 60, 2  # which ranks divide
    weight, activations = width * width * 8, 2 * (LAYERS + 3) * rows * width * 8
    for shard in SHARDS[1:]:
        for overlap in (fo.Overlap(mode="flash"), fo.Overlap(mode="flash", splits=4), fo.Overlap(mode="slice")):
            model = parallel(stack(width).double(), mesh, shard, overlap=overlap)
            optimizer, x = sgd(model.parameters()), torch.ones(rows, width, dtype=torch.float64)
            with Windows().seen() as windows:
                before, peak = live(model, optimizer, lambda model, x=x: model(x).square().mean(), leaves(model))
            assert windows.most <= 1.0
            own = -(-width // ranks) * width * 8
            values = LAYERS * weight if shard == "gradients" else 0
            momenta = parameters_ = LAYERS * own if shard == "parameters" else 0
            assert shard == "gradients" or before == momenta + parameters_ + values
            whole = 2 * weight if shard == "parameters" else 0
            found = peak - before - LAYERS * own - whole - activations
            # a slice is made whole before it leaves, as is what autograd has made for it, or makes ahead of its turn
            made = 2 * weight if overlap.mode == "slice" else weight
            room = model._engine.gradients._most
            assert found <= room + made, f"{shard} {overlap}: {found} where {room} may be in flight"
            assert room <= 3 * weight


def stacks(width):
    """What makes a stack, what it costs, and the layers that FSDP2 is to wrap."""
    x = torch.randn(16, width)
    return (
        lambda: stack(width),
        lambda model: model(x).square().mean(),
        lambda model: [each for each in model if isinstance(each, nn.Linear)],
    )


def language_models(hidden, vocab):
    """The same of two decoder layers, their embedding and their head."""
    sizes = {"hidden_size": hidden, "intermediate_size": 11 * hidden // 4, "vocab_size": vocab, "num_hidden_layers": 2}
    ids = torch.randint(vocab, (1, 64), generator=torch.Generator().manual_seed(1))

    def make():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=1))

    return make, lambda model: model(input_ids=ids, labels=ids).loss, lambda model: model.model.layers


def case_peak_memory_is_that_of_fsdp2(mesh):
    """With the same sharding, and 5 % more."""
    ranks, flash = mesh.size(), fo.Overlap("flash")
    models = [(*stacks(512), fo.Overlap()), (*stacks(256), flash), (*language_models(256, 1024), flash)]
    for (make, loss, layers, overlap), shard in itertools.product(models, SHARDS[1:]):
        theirs = make()
        settings = {"mesh": mesh, "reshard_after_forward": shard == "parameters"}
        for layer in layers(theirs):
            fully_shard(layer, **settings)
        fully_shard(theirs, **settings)
        ours = fo.data_parallel(make(), mesh, shard=shard, overlap=overlap)
        _, wanted = live(theirs, adamw(theirs.parameters()), loss)
        _, found = live(ours, adamw(ours.parameters()), loss, leaves(ours))
        name = f"{type(ours).__name__}, {shard} on {ranks} ranks"
        assert found <= 1.05 * wanted, f"{name}: {found} bytes, and FSDP2 {wanted}"
        assert not ours._engine.channels.reduce.staging.bytes  # between passes nothing is kept
