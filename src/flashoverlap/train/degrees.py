"""Over how many ranks a model is trained in which way: data parallelism x Ulysses x tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Degrees:
    """How many ranks there are along each dimension of the mesh; their product is all of them.

    Args:
        dp: that see different sequences.
        up: that see different tokens of the same sequences.
        tp: that have different heads and features.
    """

    dp: int
    up: int
    tp: int

    @staticmethod
    def of(ranks: int, dp: int, up: int, tp: int | None) -> Degrees:
        """Those of so many ranks; without ``tp`` it is what the others leave.

        Raises:
            ValueError: they do not make up the ranks.
        """
        left, odd = divmod(ranks, dp * up)
        if odd or tp not in (None, left):
            given = {"dp": dp, "up": up} | ({} if tp is None else {"tp": tp})
            product = " x ".join(f"--{name} {degree}" for name, degree in given.items())
            raise ValueError(f"{product} do not make up the {ranks} ranks that there are")
        return Degrees(dp, up, left)

    @property
    def count(self) -> int:
        """All ranks."""
        return self.dp * self.up * self.tp

    def __str__(self) -> str:
        told = [f"{name} {degree}" for name, degree in vars(self).items() if degree > 1]
        return " x ".join(told) or "one rank"
