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

from ..patterns import split_sizes
from ..torch.transport import Silent, transport_of
from .degrees import Degrees
from .stopwatch import Stopwatch


@dataclass(frozen=True)
class Ranks:
    """All ranks of a run, as this one sees them.

    Args:
        degrees: over how many ranks a model is trained in which way.
        everyone: a mesh ("dp", "up", "tp") of all ranks.
        control: a group for all that is not training: barriers, maxima of times, what checkpoints say to each other.
        device: of this rank.
    """

    degrees: Degrees
    everyone: DeviceMesh
    control: Any
    device: torch.device

    @property
    def mesh(self) -> DeviceMesh:
        """What one model is parallelized over: ("tp",), or ("up", "tp") where its tokens are spread."""
        return self.everyone["tp"] if self.degrees.up == 1 else self.everyone["up", "tp"]

    @property
    def replicas(self) -> DeviceMesh:
        """The ranks that see other sequences with the same part of the model."""
        return self.everyone["dp"]

    @property
    def transports(self) -> list[Any]:
        """Of all groups that operators move anything on."""
        like = torch.empty(0, device=self.device)
        return [transport_of(self.everyone[name], like=like) for name in ("dp", "up", "tp")]

    def silent(self, rows: int) -> dict[str, Silent]:
        """By dimension, a transport of as many ranks that moves nothing, for sequences of so many tokens."""
        dp, up, tp = self.everyone.get_coordinate() or (0, 0, 0)
        rows_of_up = split_sizes(rows, self.degrees.up)[up]
        return {
            "dp": Silent(dp, self.degrees.dp),
            "up": Silent(up, self.degrees.up, rows),
            "tp": Silent(tp, self.degrees.tp, rows_of_up),
        }

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


def started() -> int:
    """How many ranks torchrun or the lab started; without either, this process is the only one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def joined(degrees: Degrees) -> Iterator[Ranks]:
    """Joins the ranks that were started, which are as many as the degrees say."""
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
        shape = (degrees.dp, degrees.up, degrees.tp)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "up", "tp"))
        yield Ranks(degrees, mesh, dist.new_group(backend="gloo"), device)
    finally:
        dist.destroy_process_group()
