"""What ranks as threads cannot show: registered groups, meshes, subgroups, and a world destroyed and made anew."""

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import flashoverlap.torch as fo
from unsharded import COLUMN, MLP, Problem

# where torch can number a group's ranks in the order that they are given in
UNSORTED = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}


def _check(group):
    for op in (COLUMN, MLP):
        Problem(op, (9, 5), 0).check(dist.get_rank(group), group)


def _world(rank, path):
    torch.set_num_threads(1)
    for life in range(2):
        dist.init_process_group("gloo", init_method=f"file://{path}/{life}", rank=rank, world_size=4)
        _check(dist.group.WORLD)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        Problem(COLUMN, (9, 5), 0).check(mesh["tp"].get_local_rank(), mesh["tp"].get_group())
        x = torch.arange(3.0).tensor_split(2)[rank % 2][:, None]
        assert fo.all_gather_linear(x, torch.ones(1, 1), group=mesh["tp"]).flatten().tolist() == [0.0, 1.0, 2.0]
        with pytest.raises(ValueError, match="2 dimensions"):
            fo.all_gather_linear(x, torch.ones(1, 1), group=mesh)
        for ranks in ([3, 1], [2, 3, 0]):
            group = dist.new_group(ranks, **UNSORTED)
            if rank in ranks:
                _check(group)
            else:
                with pytest.raises(ValueError, match="not a member"):
                    fo.all_gather_linear(x, torch.ones(1, 1), group=group)
        dist.barrier()
        dist.destroy_process_group()


def test_registered_groups_meshes_subgroups_and_a_second_life(tmp_path):
    mp.spawn(_world, args=(str(tmp_path),), nprocs=4)
