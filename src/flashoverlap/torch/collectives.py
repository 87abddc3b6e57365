"""A backend's own collectives on pieces of unequal size, padded where the backend wants one size.

Each takes (group, rank, reads, writes) and returns the Work and what is left to do once it is done, or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# tensors made in inference mode could not be written to by the backend's threads, which are not in it
_written_elsewhere = torch.inference_mode(False)


def _padded(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """The pieces as rows of one tensor, each padded to the largest."""
    block = pieces[0].new_zeros(len(pieces), max(piece.numel() for piece in pieces))
    for row, piece in zip(block, pieces, strict=True):
        row[: piece.numel()] = piece.flatten()
    return block


def _unpad(block: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    for row, piece in zip(block, pieces, strict=True):
        piece.flatten().copy_(row[: piece.numel()])


@_written_elsewhere
def _all_gather(group: Any, rank: int, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Any:
    if all(write.numel() == reads[0].numel() for write in writes):
        # what is gathered is the caller's, and gloo would write it back
        outputs = [torch.empty_like(write) if other == rank else write for other, write in enumerate(writes)]
        return group.allgather([outputs], [reads[0]]), None
    largest = max(write.numel() for write in writes)
    mine = reads[0].new_zeros(largest)
    mine[: reads[0].numel()] = reads[0].flatten()
    block = mine.new_empty(len(writes), largest)
    others = [other for other in range(len(writes)) if other != rank]
    return group.allgather([list(block)], [mine]), lambda: _unpad(block[others], [writes[other] for other in others])


@_written_elsewhere
def _reduce_scatter(group: Any, rank: int, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Any:
    block = _padded(reads)
    mine = block.new_empty(block.shape[1])
    return group._reduce_scatter_base(mine, block.flatten()), lambda: _unpad(mine[None], writes)


@_written_elsewhere
def _all_reduce(group: Any, rank: int, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Any:
    block = torch.cat([read.flatten() for read in reads])

    def finish() -> None:
        for part, write in zip(block.split([write.numel() for write in writes]), writes, strict=True):
            write.flatten().copy_(part)

    return group.allreduce([block]), finish


@_written_elsewhere
def _all_to_all(group: Any, rank: int, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Any:
    sends, receives = [read.numel() for read in reads], [write.numel() for write in writes]
    block = torch.cat([read.flatten() for read in reads])
    arrived = block.new_empty(sum(receives))

    def finish() -> None:
        for part, write in zip(arrived.split(receives), writes, strict=True):
            write.flatten().copy_(part)

    return group.alltoall_base(arrived, block, receives, sends), finish


COLLECTIVES = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
}
