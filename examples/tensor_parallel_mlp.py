"""A tensor-parallel MLP whose communication is hidden: sharded, run in two ways, and compared with the unsharded one.

torchrun --nproc-per-node 2 examples/tensor_parallel_mlp.py
flashoverlap lab --ranks 2 --link 1gbit -- python examples/tensor_parallel_mlp.py
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import silu

import flashoverlap.torch as fo


class Mlp(nn.Module):
    """The unsharded module: ``down(silu(up(x)))``."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu(self.up(x)))


class ShardedMlp(nn.Module):
    """One rank's shard of it. Rows of x are sharded too: in and out come the rows that ``torch.tensor_split`` gives.

    Which features go to which rank is the same rule. The bias of ``down`` is kept whole on every rank and added once.
    """

    def __init__(self, whole: Mlp, group: dist.ProcessGroup, overlap: fo.Overlap, one_schedule: bool) -> None:
        super().__init__()
        self.group, self.overlap, self.one_schedule = group, overlap, one_schedule
        rank, ranks = group.rank(), group.size()

        def shard(tensor: torch.Tensor, dim: int) -> nn.Parameter:
            return nn.Parameter(tensor.detach().tensor_split(ranks, dim)[rank].clone())

        self.up = shard(whole.up.weight, 0)
        self.up_bias = shard(whole.up.bias, 0)
        self.down = shard(whole.down.weight, 1)
        self.down_bias = nn.Parameter(whole.down.bias.detach().clone())

    def forward(self, x_shard: torch.Tensor) -> torch.Tensor:
        how = {"group": self.group, "overlap": self.overlap}
        if self.one_schedule:
            return fo.mlp(
                x_shard, self.up, self.down, activation="silu", up_bias=self.up_bias, down_bias=self.down_bias, **how
            )
        h = silu(fo.all_gather_linear(x_shard, self.up, self.up_bias, **how))
        return fo.linear_reduce_scatter(h, self.down, self.down_bias, **how)


def largest_error(whole: Mlp, sharded: ShardedMlp, x: torch.Tensor) -> float:
    """Runs both, forward and backward, on one batch ``[rows, hidden]``: how far any output or gradient of any rank is
    from the unsharded one, relative to the largest value in it."""
    rank, ranks = sharded.group.rank(), sharded.group.size()
    whole.zero_grad()
    whole_x = x.clone().requires_grad_()
    whole_z = whole(whole_x)
    whole_z.square().mean().backward()

    x_shard = x.tensor_split(ranks)[rank].clone().requires_grad_()
    z_shard = sharded(x_shard)
    (z_shard.square().sum() / whole_z.numel()).backward()  # each rank adds its rows' part of the mean

    errors = [torch.zeros(())]
    for got, wanted, dim in (
        (z_shard, whole_z, 0),
        (x_shard.grad, whole_x.grad, 0),
        (sharded.up.grad, whole.up.weight.grad, 0),
        (sharded.up_bias.grad, whole.up.bias.grad, 0),
        (sharded.down.grad, whole.down.weight.grad, 1),
        (sharded.down_bias.grad, whole.down.bias.grad, None),
    ):
        mine = wanted if dim is None else wanted.tensor_split(ranks, dim)[rank]
        if mine.numel():
            errors.append((got - mine).detach().abs().max() / wanted.detach().abs().max())
    worst = torch.stack(errors).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=sharded.group)
    return float(worst)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", type=int, default=1024)
    arguments.add_argument("--hidden", type=int, default=256)
    arguments.add_argument("--ffn", type=int, default=1024)
    arguments.add_argument("--mode", default="flash", help="flash, slice, collective, off or auto")
    options = arguments.parse_args()

    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)  # all ranks build the same module and the same batch
    whole = Mlp(options.hidden, options.ffn)
    x = torch.randn(options.rows, options.hidden)

    wrong = False
    for name, one_schedule in (("fo.mlp", True), ("all_gather_linear, linear_reduce_scatter", False)):
        sharded = ShardedMlp(whole, group, fo.Overlap(mode=options.mode), one_schedule)
        error = largest_error(whole, sharded, x)
        wrong |= not error < 1e-4
        if group.rank() == 0:
            print(f"{name}: outputs and gradients differ from the unsharded ones by {error:.1e} at most, relatively")
    if group.rank() == 0:
        print(fo.report())
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
