"""One unit's gradient from autograd to the optimizer: taken, cut into blocks, summed, gathered where all want it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ..staging import Lease
from .flight import Fill, Gathering, Reduction
from .unit import Unit

Product = Callable[[torch.Tensor, int, int, float, float], None]
"""``product(out, start, stop, beta, alpha)``: ``out = alpha * rows of the gradient + beta * out``."""


class Way(NamedTuple):
    """How gradients travel: the same for all units of a model.

    Args:
        pattern: "direct", "ring" or "collective".
        scale: of each rank's term: 1 / ranks for a mean.
        accumulate: dtype in which terms are added, or theirs where that is wider.
    """

    pattern: str
    scale: float
    accumulate: torch.dtype

    def travels(self, unit: Unit) -> torch.dtype:
        """The dtype of what is sent: where that is a sum already, the one of the accumulation."""
        wide = torch.promote_types(unit.dtype, self.accumulate)
        return unit.dtype if self.pattern == "direct" else wide

    def room(self, unit: Unit, part: Sequence[tuple[int, int]], rank: int) -> int:
        """Bytes that a part holds until it has left: the pieces of others, and their terms of the own one."""
        sizes = [stop - start for start, stop in part]
        return 2 * (sum(sizes) - sizes[rank]) * self.travels(unit).itemsize


class Journey:
    """The gradient of one unit in one backward pass.

    [Note: scaled at the source] Each rank's term is scaled as it is made, by the matmul that makes it or the copy that
    packs it, so that a mean costs no pass over memory of its own, and a half-precision sum cannot overflow.

    [Note: taken away] A gradient in flight is not the leaf's: what else autograd finds for the leaf in the same pass
    is kept apart from it and follows later.

    [Note: let go of] Of a sharded unit the own piece alone is kept when all has left. What is computed where it leaves
    from is made part by part, in room that a part gives back when it has left.
    """

    def __init__(self, unit: Unit, transport: Any, way: Way) -> None:
        self.unit, self._transport, self._way = unit, transport, way
        self._lease = Lease(transport.staging, unit.device)
        self._rank = transport.rank
        self._totals = [member.take() for member in unit.members]
        self._travels = way.travels(unit)
        total = self._totals[0]
        in_place = unit.single and self._travels == unit.dtype
        self.is_made = in_place and total is not None and total.is_contiguous()
        """Whether what travels lies there already, whole, where autograd has made it."""
        self.found = [total is not None for total in self._totals]
        """For each member, whether this rank has a gradient of it."""
        self.gatherings: list[Gathering] = []
        self._under_way = len(unit.parts)
        self._whole: torch.Tensor | None = None  # what may itself become the gradient
        self._out: torch.Tensor  # of a sharded unit the own piece, else all of it

    def begin(self, product: Product | None = None) -> list[Callable[[], Reduction]]:
        """What makes the reductions of all parts, in order; with ``product`` they compute the gradient as well."""
        unit, total = self.unit, self._totals[0]
        if product is not None:
            self.found = [True]
        flat: torch.Tensor | None = None
        if self.is_made:
            assert total is not None
            flat = self._whole = total.view(-1)
        elif product is None:
            flat = self._lease.tensor(1, unit.total, self._travels)[0]
        elif not unit.sharded:
            flat = self._whole = torch.empty(unit.total, dtype=unit.dtype, device=unit.device)
        if unit.sharded:
            self._out = torch.empty(unit.sizes[self._rank], dtype=unit.dtype, device=unit.device)
        elif flat is not None and flat.dtype == unit.dtype:
            self._out = flat
        else:
            self._out = self._lease.tensor(1, unit.total, unit.dtype)[0]
        return [partial(self._reduction, flat, part, product) for part in unit.parts]

    def _reduction(
        self, flat: torch.Tensor | None, part: Sequence[tuple[int, int]], product: Product | None
    ) -> Reduction:
        unit, rank, lease = self.unit, self._rank, Lease(self._transport.staging, self.unit.device)
        start, stop = part[rank]
        first = unit.starts[rank] if unit.sharded else 0
        out = self._out[start - first : stop - first]
        if flat is not None:
            blocks = [flat[begin:end] for begin, end in part]
        else:  # [Note: let go of]
            sizes = [0 if owner == rank else end - begin for owner, (begin, end) in enumerate(part)]
            blocks = [lease.tensor(1, size, self._travels)[0] for size in sizes]
        if product is not None and self._totals[0] is None:
            blocks[rank] = out  # computed where it ends
        fill = self._filler(flat, blocks, part, product)
        accumulate = torch.promote_types(unit.dtype, self._way.accumulate)
        return Reduction(self._transport, self._way.pattern, blocks, fill, out, accumulate, lease)

    def _filler(
        self,
        flat: torch.Tensor | None,
        blocks: Sequence[torch.Tensor],
        part: Sequence[tuple[int, int]],
        product: Product | None,
    ) -> Fill:
        """[Note: scaled at the source]"""
        unit, total, scale = self.unit, self._totals[0], self._way.scale

        def multiply(owner: int) -> None:
            assert product is not None
            width = unit.members[0].width
            start, stop = part[owner]
            beta = 0.0 if total is None else scale
            product(blocks[owner].view(-1, width), start // width, stop // width, beta, scale)

        def scaled(owner: int) -> None:
            if scale != 1.0:
                blocks[owner].mul_(scale)

        def packed(owner: int) -> None:
            assert flat is not None
            if not unit.single:
                unit.pack(flat, owner, self._totals, scale)
            elif total is None:
                blocks[owner].zero_()
            else:
                torch.mul(total.reshape(-1)[slice(*part[owner])], scale, out=blocks[owner])

        if product is not None:
            return multiply
        return scaled if self.is_made else packed

    def part_has_left(self) -> None:
        """One of the reductions is over ([Note: let go of])."""
        self._under_way -= 1
        if self.unit.sharded and not self._under_way:
            self._totals, self._whole = [], None
            self._lease.close()

    def gather(self, transport: Any, part: Sequence[tuple[int, int]]) -> None:
        """Posts the gather of a part that has been summed."""
        self.gatherings.append(Gathering(transport, self._way.pattern, [self._out[start:stop] for start, stop in part]))

    def deliver(self, used: Sequence[bool], add: bool) -> None:
        """Gives the result to those members that got a gradient on some rank, or adds it to the one that they have."""
        if self.unit.sharded:
            self._deliver_shards(used)
        else:
            self._deliver_whole(used, add)
        self._lease.close()

    def _deliver_shards(self, used: Sequence[bool]) -> None:
        unit = self.unit
        sizes = [stop - start for start, stop in (member.elements(self._rank) for member in unit.members)]
        for member, own, wanted in zip(unit.members, self._out.split(sizes), used, strict=True):
            if not wanted:
                continue
            parameter: Any = member.parameter
            own = own.view(parameter._local_tensor.shape)
            if parameter.grad is not None:
                parameter.grad._local_tensor.add_(own)
                continue
            spec = parameter._spec
            parameter.grad = DTensor.from_local(
                own, spec.mesh, spec.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )

    def _deliver_whole(self, used: Sequence[bool], add: bool) -> None:
        unit = self.unit
        if self._whole is not None:
            grads: list[Any] = [self._whole.view(unit.members[0].shape)]
        else:
            grads = [self._room(index) if wanted else None for index, wanted in enumerate(used)]
            for rank in range(len(unit.sizes)):
                unit.unpack(self._out, rank, grads)
        for member, grad, wanted in zip(unit.members, grads, used, strict=True):
            kept = member.take() if wanted and add else None
            if wanted:
                member.give(grad if kept is None else kept.add_(grad))

    def _room(self, index: int) -> torch.Tensor:
        """Where the gradient of a packed member goes: back to where it came from, if it can."""
        total, member = self._totals[index], self.unit.members[index]
        if total is not None and total.is_contiguous() and total.dtype == self.unit.dtype:
            return total
        return torch.empty(member.shape, dtype=self.unit.dtype, device=self.unit.device)
