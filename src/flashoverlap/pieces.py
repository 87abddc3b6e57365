"""Names of the pieces of a flow, which the builders of schedules share."""

from __future__ import annotations

from .rounds import partners


class Pieces:
    """Names of the pieces of one flow: split 1 of piece 2 of x is ``x2.1``; and who meets whom in which round."""

    def __init__(self, ranks: int, splits: int, nodes: int = 1) -> None:
        self.ranks, self.splits, self.nodes = ranks, splits, nodes

    def rounds(self, rank: int) -> list[tuple[int, int]]:
        """``(other, source)`` of each round: the rank that gets a partial sum of its piece, and the one that gives one.
        A gathered piece goes the other way, so that the pieces of others arrive in the order in which they leave."""
        return partners(self.ranks, rank, self.nodes)

    def sources(self, rank: int) -> list[int]:
        """The ranks that partial sums come from, in order."""
        return [source for _, source in self.rounds(rank)]

    def name(self, letter: str, owner: int, split: int) -> str:
        return f"{letter}{owner}" if self.splits == 1 else f"{letter}{owner}.{split}"

    def of(self, letter: str, owner: int) -> tuple[str, ...]:
        return tuple(self.name(letter, owner, split) for split in range(self.splits))

    def slice(self, letter: str, split: int) -> tuple[str, ...]:
        return tuple(self.name(letter, owner, split) for owner in range(self.ranks))

    def all(self, letter: str) -> tuple[str, ...]:
        return tuple(name for owner in range(self.ranks) for name in self.of(letter, owner))
