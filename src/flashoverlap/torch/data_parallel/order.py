"""The order in which units travel: learned from a step and agreed on, never one rank's arrivals alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence


class Order:
    """Numbers of all units in the order that every rank keeps to, and what this rank would have liked.

    Args:
        numbers: the order until there is a better one; the same on every rank.

    Attributes:
        places: of those units whose order has been learned, where in the step they had their turn.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = list(numbers)
        self.places: dict[int, int] = {}
        self._wished: dict[int, int] = {}

    def wish(self, number: int, place: int = 0) -> None:
        """Notes that a unit was ready, or needed, after all those noted before it, and at which place of the step."""
        self._wished.setdefault(number, place)

    def words(self) -> str:
        """What must be equal on all ranks for :meth:`settle`."""
        return f"{self.numbers} {self._wished}"

    def settle(self, alike: bool) -> None:
        """Ends a step: where all ranks wished ``alike``, the wish is the order of the next one, the rest behind it."""
        if alike and self._wished:
            rest = [number for number in self.numbers if number not in self._wished]
            self.numbers, self.places = [*self._wished, *rest], self._wished
        self._wished = {}


def digest(words: Sequence[str]) -> int:
    """A number that is equal on ranks that say the same."""
    return int.from_bytes(hashlib.blake2b("\n".join(words).encode(), digest_size=8).digest(), "little") >> 1
