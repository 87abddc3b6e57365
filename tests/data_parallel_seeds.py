"""Two replicas of two tensor-parallel ranks, each a process of its own with a hash seed of its own.

``outcomes()`` runs them and returns for each the order of its branches, and what it has posted, by transport in the
order of their making: [members, bytes], which differ between parameters and are equal on both sides. As a program this
is one rank.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

RANKS, STEPS = 4, 200
LINEARS = {f"linear {number}": 2 * number + 10 for number in range(18)}  # their rows, which two ranks divide


def outcomes(limit_s=100.0):
    """What each rank says; an error of any is raised with the hash seeds."""
    with tempfile.TemporaryDirectory() as directory:
        seeds = [str(random.randrange(1, 1 << 32)) for _ in range(RANKS)]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), directory],
                env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, seed in enumerate(seeds)
        ]
        end_s = time.monotonic() + limit_s
        try:
            told = [rank.communicate(timeout=max(0.1, end_s - time.monotonic()))[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert not any(rank.returncode for rank in ranks), f"hash seeds {seeds}:\n" + "\n".join(told)
        return [json.loads(Path(directory, f"{rank}.json").read_text()) for rank in range(RANKS)]


def main(rank, directory):
    """One rank: two models, in whose branches it goes by an order of its own."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    import flashoverlap.torch as fo
    from data_parallel_cases import close, gradients, parameters, same_on_all_ranks, sgd
    from flashoverlap.torch.data_parallel import apply
    from flashoverlap.torch.gloo import Gloo

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 6, bias=False))
            self.branches = nn.ModuleDict({name: nn.Linear(6, rows, bias=False) for name, rows in LINEARS.items()})

        def forward(self, x):
            x = x + self.mlp(x)
            return sum(self.branches[name](x).square().mean() for name in set(LINEARS))  # in the order of their hashes

    def made():
        torch.manual_seed(2)
        return Model().double()

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{directory}/store", RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    posted, post = {}, Gloo.post

    def noted(self, send, *rest):
        posted.setdefault(self, []).append(send.nbytes)
        return post(self, send, *rest)

    Gloo.post = noted
    late, replica = random.Random(rank), mesh.get_local_rank("dp")
    plan, runs = {"0": fo.ColumnParallel(), "2": fo.RowParallel()}, []
    for shard in ("none", "gradients"):
        reference, model = made(), made()
        fo.parallelize(model.mlp, mesh["tp"], plan, sequence_parallel=False)
        model = apply(model, mesh["dp"], mesh["dp"], shard=shard, small_bytes=0)
        assert len(list(model.parameters())) == 20
        runs.append((shard, reference, model, sgd(reference.parameters()), sgd(model.parameters())))
    for step in range(STEPS):
        shard, reference, model, theirs, ours = runs[step % 2]
        x = torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        theirs.zero_grad()
        ours.zero_grad()
        sum(reference(each) for each in x).div(2).backward()
        time.sleep(late.random() * 0.005)
        model(x[replica]).backward()
        if step % 50 < 2:
            close(gradients(model), gradients(reference), 1e-11)
        theirs.step()
        ours.step()
    for _, reference, model, *_ in runs:
        close(parameters(model), parameters(reference), 1e-10)
        same_on_all_ranks(mesh["dp"], parameters(model))
    told = [[transport.members, sizes] for transport, sizes in posted.items()]
    Path(directory, f"{rank}.json").write_text(json.dumps({"order": list(set(LINEARS)), "posted": told}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
