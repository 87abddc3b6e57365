"""Data parallelism that goes on elsewhere, and beside both other kinds on one mesh: run by model_ranks.py."""

import copy
import itertools
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flashoverlap.torch as fo
from data_parallel_cases import SHARDS, adamw, joint, loss_of, net, parallel, parameters
from data_parallel_cases import close as same
from model_cases import close, dense_loss, full, gradients, llama, made, tokens

SAMPLES = 4  # of a step, spread over however many ranks there are


def take_steps(model, optimizer, mesh, steps):
    each = SAMPLES // mesh.size()
    own = range(mesh.get_local_rank() * each, (mesh.get_local_rank() + 1) * each)
    for step in steps:
        optimizer.zero_grad()
        (sum(loss_of(model, sample, step) for sample in own) / each).backward()
        optimizer.step()


def case_two_ranks_write_what_four_and_one_go_on_with(mesh):
    """Model and optimizer, in sizes that ranks do not divide; what then is learned is what one process learns."""
    if mesh.size() != SAMPLES:
        return
    rank = mesh.get_local_rank()
    where = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(where, 0)
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([one]) for one in range(SAMPLES)][rank]
    reference = net()
    optimizer = adamw(reference.parameters())
    for step in range(4):
        optimizer.zero_grad()
        joint(reference, SAMPLES, step).backward()
        optimizer.step()
    for shard in SHARDS if rank < 2 else ():
        two = DeviceMesh.from_group(pair, "cpu", mesh_dim_names=("dp",))
        model = parallel(net(), two, shard)
        optimizer = adamw(model.parameters())
        take_steps(model, optimizer, two, range(2))
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(states, checkpoint_id=Path(where[0], shard), process_group=pair)
    dist.barrier()
    one = DeviceMesh.from_group(alone, "cpu", mesh_dim_names=("dp",))
    for here, written, shard in itertools.product((mesh, one), SHARDS, SHARDS):
        if here is one and written != shard:
            continue
        model = parallel(net(rows=11), here, shard)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # nothing of it is to be left
        optimizer = adamw(model.parameters())
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=Path(where[0], written), process_group=here.get_group())
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        take_steps(model, optimizer, here, range(2, 4))
        same(parameters(model), parameters(reference))


def case_replicas_sequences_and_features(mesh):
    """2 x 2 x 2: each replica has sequences of its own, whose rows and features four ranks share."""
    if mesh.size() != 8:
        return
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "up", "tp"))
    rank = mesh.get_local_rank("dp")
    start = made(lambda: llama(num_key_value_heads=2))
    for shard in SHARDS:
        dense = copy.deepcopy(start)
        model = fo.parallelize(copy.deepcopy(start), mesh["up", "tp"], attention="ulysses")
        model = fo.data_parallel(model, mesh["dp"], shard=shard)
        theirs, ours = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (dense, model))
        for step in range(2):
            ids, labels = tokens(batch=2, seed=step)
            theirs.zero_grad()
            ours.zero_grad()
            want = [dense_loss(dense, *part)[1] for part in zip(ids.chunk(2), labels.chunk(2), strict=True)]
            (sum(want) / 2).backward()
            loss = model(input_ids=ids.chunk(2)[rank], labels=labels.chunk(2)[rank]).loss
            close(loss, want[rank], f"{shard} loss", 1e-6)
            loss.backward()
            found = gradients(model)
            for name, parameter in dense.named_parameters():
                close(found[name], parameter.grad, f"{shard} {name}", 1e-6)
            theirs.step()
            ours.step()
        for (name, parameter), other in zip(model.named_parameters(), dense.parameters(), strict=True):
            close(full(parameter), other, f"{shard} {name}", 1e-5)
