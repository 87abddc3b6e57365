"""Units: parameters that travel together, and where each of their elements lies.

Piece ``j`` of a unit belongs to rank ``j``: its rows of every member one after another, by the rule of torch.chunk
along dimension 0, which is that of DTensor's ``Shard(0)``. A unit of one member is laid out as that member is, so
that pieces are views of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...patterns import split_sizes


def chunk_sizes(rows: int, ranks: int) -> list[int]:
    """Rows of each rank by the rule of torch.chunk, with ranks that have none at the end."""
    each = -(-rows // ranks)
    return [max(0, min(each, rows - rank * each)) for rank in range(ranks)]


def local(tensor: Any) -> torch.Tensor:
    """What lies on this rank of a DTensor of another mesh (tensor parallelism); a plain tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Member:
    """One parameter of a unit.

    Args:
        name: its first name in the model.
        leaf: what forward uses and autograd accumulates into.
        places: the modules that have it, and the name that it has there.
        ranks: how many ranks share it.
    """

    def __init__(self, name: str, leaf: nn.Parameter, places: Sequence[tuple[nn.Module, str]], ranks: int) -> None:
        self.name, self.leaf, self.places = name, leaf, list(places)
        self.parameter: nn.Parameter = leaf  # what the optimizer sees
        shape = local(leaf).shape
        self.shape = tuple(shape)
        self.width = prod(shape[1:])  # elements of a row
        self.rows = chunk_sizes(shape[0] if shape else 1, ranks)
        self.starts = [0, *accumulate(self.rows)]

    def elements(self, rank: int) -> tuple[int, int]:
        """Where the rows of ``rank`` lie in the flat parameter."""
        return self.starts[rank] * self.width, self.starts[rank + 1] * self.width

    @property
    def value(self) -> torch.Tensor:
        """The data on this rank, out of autograd's sight."""
        return local(self.leaf.data)

    def own(self, rank: int) -> torch.Tensor:
        """The rows of ``rank``, a view of the value."""
        start, stop = self.elements(rank)
        return self.value.view(-1)[start:stop].view(self.rows[rank], *self.shape[1:])

    def shard(self) -> torch.Tensor:
        """What the optimizer steps on, of the parameter that the model has now."""
        module, name = self.places[0]
        found: Any = module._parameters[name]
        if found is not self.parameter:  # load_state_dict(assign=True)
            self.parameter = found
        return found._local_tensor

    def own_up(self, rank: int) -> None:
        """Brings the shard into the value, where it is a view of it no more."""
        shard, own = self.shard(), self.own(rank)
        if shard.data_ptr() != own.data_ptr():
            own.copy_(shard)

    def take(self) -> torch.Tensor | None:
        """The gradient that autograd has accumulated, taken away from the leaf."""
        grad, self.leaf.grad = self.leaf.grad, None
        if grad is not None and grad.layout != torch.strided:
            grad = grad.to_dense()  # nn.Embedding(sparse=True)
        return None if grad is None else local(grad)

    def give(self, grad: torch.Tensor) -> None:
        """Makes ``grad``, of the shape on this rank, the gradient of the leaf."""
        if isinstance(self.leaf, DTensor):
            spec: Any = self.leaf
            grad = DTensor.from_local(
                grad, spec.device_mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride()
            )
        self.leaf.grad = grad


class Unit:
    """Parameters that travel together.

    Args:
        index: its number in the model.
        members: of one dtype and device.
        ranks: how many ranks share them.
        parts: how many times each piece is cut; more than one only where there is one member.
        sharded: whether the optimizer sees the own piece alone.
        linear: whether this is the weight of an nn.Linear and nothing else.

    Attributes:
        tokens: of a linear, rows of its input when its gradient was last computed; 0 before that.
        chained: whether the gradient of its input was computed then.
    """

    def __init__(
        self, index: int, members: Sequence[Member], ranks: int, *, parts: int = 1, sharded: bool, linear: bool
    ) -> None:
        self.index, self.members, self.sharded, self.linear = index, list(members), sharded, linear
        first = members[0]
        self.name = first.name if len(members) == 1 else f"{first.name} and {len(members) - 1} more"
        self.dtype, self.device = first.leaf.dtype, first.value.device
        self.sizes = [sum(stop - start for start, stop in self._elements(rank)) for rank in range(ranks)]
        self.starts = [0, *accumulate(self.sizes)]
        self.total = self.starts[-1]
        self.tokens, self.chained = 0, False
        self.parts = self._parts(ranks, parts)

    def cut(self, parts: int) -> None:
        """Cuts each piece so many times from now on; nothing of it may be in flight."""
        self.parts = self._parts(len(self.sizes), parts)

    def _elements(self, rank: int) -> Iterator[tuple[int, int]]:
        return (member.elements(rank) for member in self.members)

    def _parts(self, ranks: int, parts: int) -> list[list[tuple[int, int]]]:
        """For each part the range of every rank in the flat unit, cut between rows."""
        if len(self.members) > 1 or parts == 1:
            return [[(self.starts[rank], self.starts[rank + 1]) for rank in range(ranks)]]
        (member,) = self.members
        cuts = [[0, *accumulate(split_sizes(rows, parts))] for rows in member.rows]
        return [
            [
                (
                    self.starts[rank] + cuts[rank][part] * member.width,
                    self.starts[rank] + cuts[rank][part + 1] * member.width,
                )
                for rank in range(ranks)
            ]
            for part in range(parts)
        ]

    @property
    def is_trained(self) -> bool:
        """Whether gradients of it are wanted."""
        return any(member.leaf.requires_grad for member in self.members)

    @property
    def single(self) -> bool:
        """Whether it is laid out as its one member."""
        return len(self.members) == 1

    def spread(self, flat: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Views of what each member has in piece ``rank`` of a flat unit."""
        sizes = [stop - start for start, stop in self._elements(rank)]
        return list(flat[self.starts[rank] : self.starts[rank + 1]].split(sizes))

    def pack(self, flat: torch.Tensor, rank: int, tensors: Sequence[torch.Tensor | None], scale: float) -> None:
        """Writes piece ``rank`` of the members' tensors, times ``scale``, into the flat unit; None counts as zeros."""
        for target, tensor, (start, stop) in zip(self.spread(flat, rank), tensors, self._elements(rank), strict=True):
            if tensor is None:
                target.zero_()
            else:
                torch.mul(tensor.reshape(-1)[start:stop], scale, out=target)

    def unpack(self, flat: torch.Tensor, rank: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Writes piece ``rank`` of a flat unit into contiguous tensors of the members' shapes."""
        for source, tensor, (start, stop) in zip(self.spread(flat, rank), tensors, self._elements(rank), strict=True):
            if tensor is not None:
                tensor.view(-1)[start:stop].copy_(source)
