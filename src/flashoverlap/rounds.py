"""Who exchanges with whom in which round: every round a permutation, every pair of ranks met once.

On one node, round d takes rank r to r + d. Over nodes of s ranks each that is uneven, 2 nodes of 4 in rank order:

    round                  1    2    3    4    5    6    7
    of a node's 4 ranks
    leave the node         1    2    3    4    3    2    1       the shared uplink idles, then takes four at once

Spread over nodes, round (u, e) takes local rank i of node a to local rank i + e of node a + u + i. Which node that is
depends on i, so that of the s ranks of a node s / nodes stay inside in each of these rounds (or as near as whole
numbers come), and both fabrics are busy. What is left are the ranks of the same place on the other nodes, e = 0: there
all leave, and these rounds stand evenly between the others.

    round (u, e)         0,1  1,1  0,2   *   1,2  0,3  1,3      * is e = 0
    leave the node         2    2    2    4    2    2    2
"""

from __future__ import annotations

from functools import lru_cache


def partners(ranks: int, rank: int, nodes: int = 1) -> list[tuple[int, int]]:
    """For each round ``(to, frm)`` of a rank that sends forth; one that gathers swaps them, to meet in the same order.

    Raises:
        ValueError: the ranks are no whole number for each node.
    """
    if nodes < 1 or ranks % nodes:
        raise ValueError(f"{ranks} ranks are no whole number of ranks for each of {nodes} nodes")
    if nodes in (1, ranks):
        return [((rank + distance) % ranks, (rank - distance) % ranks) for distance in range(1, ranks)]
    return [_spread(ranks, nodes, rank, *step) for step in _steps(ranks // nodes, nodes)]


@lru_cache(maxsize=64)
def _steps(size: int, nodes: int) -> tuple[tuple[int, int], ...]:
    """The rounds (u, e) in order, those with e = 0 in the middle of equal stretches of the others."""
    mixed = [(step, turn) for turn in range(1, size) for step in range(nodes)]
    across = [(step, 0) for step in range(1, nodes)]
    at = {len(mixed) * (2 * number + 1) // (2 * len(across)): step for number, step in enumerate(across)}
    steps: list[tuple[int, int]] = []
    for number in range(len(mixed) + 1):
        steps += [at[number]] if number in at else []
        steps += mixed[number : number + 1]
    return tuple(steps)


def _spread(ranks: int, nodes: int, rank: int, step: int, turn: int) -> tuple[int, int]:
    size = ranks // nodes
    node, place = divmod(rank, size)
    if not turn:
        return (rank + step * size) % ranks, (rank - step * size) % ranks
    after, before = (place + turn) % size, (place - turn) % size
    return (node + step + place) % nodes * size + after, (node - step - before) % nodes * size + before
