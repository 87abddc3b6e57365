"""The ranks of a run: how they find each other, and what each of them works on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .stopwatch import Stopwatch


@dataclass(frozen=True)
class Ranks:
    """All ranks of a run, as this one sees them.

    Args:
        mesh: of one dimension, over all ranks: that of tensor parallelism.
        control: a group for all that is not training: barriers, maxima of times, what checkpoints say to each other.
        device: of this rank.
    """

    mesh: DeviceMesh
    control: Any
    device: torch.device

    @property
    def rank(self) -> int:
        """This one's number."""
        return dist.get_rank()

    @property
    def count(self) -> int:
        """How many there are."""
        return dist.get_world_size()

    @property
    def stopwatch(self) -> Stopwatch:
        """Times what all ranks do together."""
        return Stopwatch(self.control, self.device)


@contextmanager
def joined() -> Iterator[Ranks]:
    """Joins the ranks that torchrun or the lab started; without either, this process is the only one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        device = torch.device("cpu")
    else:
        device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    if "RANK" in os.environ:
        dist.init_process_group()
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
        yield Ranks(mesh, dist.new_group(backend="gloo"), device)
    finally:
        dist.destroy_process_group()
