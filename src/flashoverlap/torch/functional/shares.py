"""Which features of a weight belong to which rank: one range a rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from ...patterns import split_sizes

Shares = tuple[range, ...]


def tensor_split(features: int, world_size: int) -> Shares:
    """The ranges of ``torch.tensor_split``."""
    return tuple(range(*edges) for edges in pairwise((0, *accumulate(split_sizes(features, world_size)))))


def check_shares(op: str, shares: Any, features: int, world_size: int, *, all_once: bool) -> Shares:
    """The shares that the caller gave, or those of ``torch.tensor_split`` for None.

    Args:
        op: public name of the operator.
        shares: None, or a range of features for each rank.
        features: of the weight.
        world_size: number of ranks.
        all_once: whether each feature must belong to exactly one rank.

    Raises:
        TypeError: they are no sequence of ranges.
        ValueError: another number of ranges, or ranges outside of the features; features that belong to no rank, or to
            several, where that cannot be.
    """
    if shares is None:
        return tensor_split(features, world_size)
    if not isinstance(shares, Sequence) or not all(isinstance(share, range) for share in shares):
        raise TypeError(f"{op}: shares must be a range of features for each rank, not {shares!r}")
    found = tuple(shares)
    if len(found) != world_size:
        raise ValueError(f"{op}: {len(found)} shares for {world_size} ranks; give a range for each")
    for share in found:
        if share.step != 1 or len(share) != share.stop - share.start or not 0 <= share.start <= share.stop <= features:
            raise ValueError(f"{op}: share {share} is no range of the {features} features")
    if all_once and not partition(found, features):
        raise ValueError(f"{op}: shares {list(found)} must hold each of the {features} features exactly once")
    return found


def check_partition(op: str, shares: Any, features: int, transport: Any) -> Shares:
    """The shares that the caller gave, which say how many features there are; this rank has so many of them.

    Raises:
        TypeError, ValueError: as :func:`check_shares` does, or this rank's share is of another size.
    """
    stops = [share.stop for share in shares if isinstance(share, range)]
    found = check_shares(op, shares, max(stops, default=0), transport.world_size, all_once=True)
    own = found[transport.rank]
    if len(own) != features:
        raise ValueError(f"{op}: what has {features} features has not the features of this rank, {own}")
    return found


def partition(shares: Shares, features: int) -> bool:
    """Whether each feature is in exactly one share."""
    filled = sorted((share.start, share.stop) for share in shares if len(share))
    edges = [0, *(edge for pair in filled for edge in pair), features]
    return all(start == stop for start, stop in zip(edges[::2], edges[1::2], strict=True))


def features_of(heads: range, size: int) -> range:
    """The features of some heads of ``size`` features each."""
    return range(heads.start * size, heads.stop * size)


def at(share: range) -> slice:
    """A share as an index."""
    return slice(share.start, share.stop)
