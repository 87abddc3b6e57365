"""Peak memory by the tensors that are live: fresh ones, freed ones, and storages that are given up and taken again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from flashoverlap.live_bytes import LiveBytes, held


def test_live_bytes_of_a_pass():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Tanh(), torch.nn.Linear(8, 8, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    with LiveBytes(held(model, optimizer)) as live:
        assert live.peak == 2 * 64 * 4
        out = model(torch.ones(1000, 8))
        assert live.peak == 2 * 64 * 4 + 3 * 32_000  # input, and two of linear, tanh, output at a time
        out.sum().backward()
    assert live.peak > 2 * 64 * 4 + 3 * 32_000


def test_a_storage_counts_at_the_size_that_it_has():
    kept = torch.ones(1000)
    storage = kept.untyped_storage()
    with LiveBytes([kept], more=100) as live:
        storage.resize_(0)
        torch.ones(500)
        assert live.peak == 4000 + 100
        storage.resize_(8000)
        torch.ones(500)
    assert live.peak == 8000 + 2000 + 100


def test_what_an_operator_takes_is_counted_too():
    kept = torch.ones(1000)
    with LiveBytes([]) as live:
        kept.sum()
    assert live.peak == 4004


def test_of_a_distributed_tensor_the_own_shard_counts():
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        shard = DTensor.from_local(torch.ones(500), mesh, [Shard(0)], run_check=False)
        with LiveBytes([shard]) as live:
            assert live.peak == 2000
            kept = shard + shard
            assert live.peak == 4000
        del kept
    finally:
        dist.destroy_process_group()
