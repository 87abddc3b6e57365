"""Which heads of an attention a rank computes: those of its tp, and of these its share of up."""

from __future__ import annotations

from ..functional.shares import Shares, features_of, tensor_split
from .parallel import Parallel


class HeadShare:
    """Which heads a rank computes.

    Over tp, query and key/value heads are cut evenly, or n/G ranks share a key/value head. Over up each rank has whole
    groups of query heads with their key/value head, as many as ``torch.tensor_split`` gives it; or, where groups are
    fewer than ranks, a part of the query heads of one group, and a copy of its key/value head.

    Args:
        query: H.
        key_value: G.
        features: D.
        parallel: of the model.

    Attributes:
        key_value_rows: features of the own key/value head, where ranks of tp share it and its weights are whole.
        shares: by rank of up, ranges of query heads and of key/value heads among those of the own tp.
        own_query: number of query heads that this rank computes.
        own_key_value: of key/value heads.

    Raises:
        ValueError: heads that the ranks cannot share.
    """

    def __init__(self, query: int, key_value: int, features: int, parallel: Parallel) -> None:
        tp = parallel.world_size
        if query % tp:
            raise ValueError(f"{query} query heads cannot be spread over {tp} ranks")
        if key_value % tp and tp % key_value:
            raise ValueError(f"{key_value} key/value heads can neither be spread over {tp} ranks nor shared by them")
        if query % key_value:
            raise ValueError(f"{query} query heads cannot share {key_value} key/value heads")
        self.query, self.key_value, self.features = query, key_value, features
        of_tp, groups = query // tp, max(1, key_value // tp)
        first = parallel.rank * key_value // tp * features
        self.key_value_rows = range(first, first + features) if key_value < tp else None
        up = 1 if parallel.up is None else parallel.up.size
        if of_tp < up:
            raise ValueError(f"{of_tp} query heads cannot be spread over {up} ranks of up")
        self.shares = spread(of_tp, groups, up)
        queries, key_values = self.shares[0 if parallel.up is None else parallel.up.rank]
        self.own_query, self.own_key_value = len(queries), len(key_values)

    def features_of(self, which: int) -> Shares:
        """By rank of up, its features of queries (0), or of keys and values (1), among those of the own tp."""
        return tuple(features_of(share[which], self.features) for share in self.shares)


def spread(query: int, key_value: int, ranks: int) -> list[tuple[range, range]]:
    """Ranges of query heads and of key/value heads by rank; see :class:`HeadShare`."""
    group = query // key_value
    if key_value >= ranks:
        return [(range(own.start * group, own.stop * group), own) for own in tensor_split(key_value, ranks)]
    return [
        (range(head * group + part.start, head * group + part.stop), range(head, head + 1))
        for head, sharing in enumerate(tensor_split(ranks, key_value))
        for part in tensor_split(group, len(sharing))
    ]
