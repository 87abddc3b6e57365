"""What one unit has in flight: the reduce-scatter of a part of its gradient, or the all-gather of its pieces.

[Note: blocks] ``blocks[j]`` is piece ``j`` of a part, flat. In a reduction the blocks of others are made by
``fill``, sent, and read until they have left; the own one is summed with the terms that arrive. In a gather the own
block is sent and the others are received into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...flow import PIECE
from ...patterns import build, split_sizes
from ...schedule import Compute
from ..execute import Outcome, Run
from ..staging import Lease

Fill = Callable[[int], None]
Use = Callable[[int, int, int], None]
"""``use(owner, start, stop)``, called with rows of a block once they have arrived, the own ones first."""


def _owner(name: str) -> int:
    match = PIECE.match(name.partition("@")[0])
    assert match is not None, name
    return int(match[2])


class Reduction:
    """The reduce-scatter of one part of a unit's gradient.

    Args:
        transport: whose runs are begun in the same order on every rank.
        pattern: "direct", "ring" or "collective".
        blocks: [Note: blocks]; of the dtype that travels.
        fill: computes ``blocks[j]``, this rank's term of piece ``j``.
        out: where the sum of the own piece goes, flat; may be the own block itself.
        accumulate: dtype in which terms are added.
        lease: given back with what it has handed out when all is over.
    """

    def __init__(
        self,
        transport: Any,
        pattern: str,
        blocks: Sequence[torch.Tensor],
        fill: Fill,
        out: torch.Tensor,
        accumulate: torch.dtype,
        lease: Lease,
    ) -> None:
        self._blocks, self._fill, self._out, self._accumulate = blocks, fill, out, accumulate
        self._rank = transport.rank
        self._lease = lease
        self._arrivals: dict[str, torch.Tensor] = {}
        self._pattern = pattern
        sizes = [block.numel() for block in blocks]
        schedule = build("grad_reduce_scatter", sizes, pattern=pattern, row_bytes={"p": blocks[0].itemsize})
        self.run = Run(schedule, transport, self._tensor, {"wgrad": self._wgrad, "": self._sum}, transport.spans)

    def begin(self) -> None:
        """Computes all blocks, sending those of others on their way; what they are computed from is let go of."""
        self.run.advance()
        del self._fill

    def take_up(self) -> bool:
        """Goes on to the next wait; whether the sum is there."""
        self.run.advance()
        return self.run.through

    def close(self) -> Outcome:
        """Finishes the run; the blocks may be written to again."""
        outcome = self.run.finish()
        if self._pattern == "collective" or len(self._blocks) == 1:
            own = self._blocks[self._rank]
            if own.data_ptr() != self._out.data_ptr():
                self._out.copy_(own)
        self._lease.close()
        return outcome

    def _tensor(self, name: str) -> torch.Tensor:
        if "@" not in name:
            return self._blocks[_owner(name)]
        found = self._arrivals.get(name)
        if found is None:
            block = self._blocks[_owner(name)]
            found = self._arrivals[name] = self._lease.tensor(1, block.numel(), block.dtype)[0]
        return found

    def _wgrad(self, op: Compute) -> None:
        for name in op.reads:
            self._fill(_owner(name))

    def _sum(self, op: Compute) -> None:
        terms = [self._tensor(name) for name in op.adds]
        if op.writes[0][0] == "p":  # a partial sum that is handed on
            terms[0].add_(terms[1])
            return
        if terms[0].dtype != self._accumulate:
            total = terms[0].to(self._accumulate)
            for term in terms[1:]:
                total += term
            self._out.copy_(total)
            return
        arrived = next(self._tensor(name) for name in op.adds[:2] if "@" in name)  # read by the first addition
        total = terms[0]
        for term in terms[1:-1]:
            total = torch.add(total, term, out=arrived)
        if total.dtype == self._out.dtype:
            torch.add(total, terms[-1], out=self._out)
        else:
            self._out.copy_(torch.add(total, terms[-1], out=arrived))


class Gathering:
    """The all-gather of a unit's pieces, posted at once and read as they arrive.

    Args:
        transport: whose runs are begun in the same order on every rank.
        pattern: "direct", "ring" or "collective".
        blocks: [Note: blocks]; each is cut along its dimension 0.
        splits: parts of each piece that travel one after another.
    """

    def __init__(self, transport: Any, pattern: str, blocks: Sequence[torch.Tensor], splits: int = 1) -> None:
        self._blocks, self._use = blocks, _unused
        self._splits = 1 if pattern == "collective" else splits
        rows = [len(block) for block in blocks]
        width = blocks[0][:1].nbytes or max((block[:1].nbytes for block in blocks), default=0)
        schedule = build("param_all_gather", rows, pattern=pattern, splits=self._splits, row_bytes={"x": width})
        self.run = Run(schedule, transport, self._tensor, {"mm": self._mm}, transport.spans)
        self.run.post()

    def receive(self, use: Use | None = None) -> None:
        """Hands the pieces out as they arrive, to the last one; the own ones may still be leaving."""
        self._use = use or _unused
        while not self.run.through:
            self.run.advance()

    def close(self) -> Outcome:
        """Waits for all that is under way; the blocks may be written to again."""
        return self.run.finish()

    def _tensor(self, name: str) -> torch.Tensor:
        owner, start, stop = self._range(name)
        return self._blocks[owner][start:stop]

    def _range(self, name: str) -> tuple[int, int, int]:
        match = PIECE.match(name)
        assert match is not None, name
        owner, split = int(match[2]), int(match[3] or 0)
        sizes = split_sizes(len(self._blocks[owner]), self._splits)
        return owner, sum(sizes[:split]), sum(sizes[: split + 1])

    def _mm(self, op: Compute) -> None:
        """Adjacent splits are handed out as one."""
        last: tuple[int, int, int] | None = None
        for name in op.reads:
            owner, start, stop = self._range(name)
            if last and last[0] == owner and last[2] == start:
                last = owner, last[1], stop
            else:
                if last:
                    self._use(*last)
                last = owner, start, stop
        if last:
            self._use(*last)


def _unused(owner: int, start: int, stop: int) -> None:
    """Nothing is done with pieces as they arrive."""
