"""The one switch that every overlapped operator takes."""

from __future__ import annotations

from dataclasses import dataclass

ATTENTIONS = ("query_split", "model")  # as commands say it; "model" is None to parallelize
MODES = ("auto", "flash", "slice", "collective", "off")
DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Overlap:
    """How an operator is to hide its communication.

    Args:
        mode: "flash" decomposes the collective (arXiv 2604.24013); "slice" is data slicing; "collective" calls the
            backend's own collective and overlaps nothing; "off" moves the ideal bytes point to point and overlaps
            nothing; "auto" is what a plan says, where the group's machine is known. Where it is not, a call of a
            megabyte or more has it measured, or is "flash" with a rule of thumb for ``splits``, and a smaller one is
            "off". The report says which.
        pattern: "direct" (rotated rounds between all pairs) or "ring" (neighbours only), for "flash" and "auto".
        splits: parts that every piece is cut into, for "flash" and "auto", at most one a row (or a feature, where
            those are cut); None leaves it to the plan, or to the rule of thumb.
        slices: number of slices for "slice"; None means 4.
        strict: raise RuntimeError on every rank, before anything moves, where the mode asked for is not the one taken
            ("auto" leaves the mode open). At present every mode asked for is taken.
        accumulate_dtype: each rank's product is rounded to the dtype of the tensors; the products are added in this
            dtype, or in theirs where it is wider, and the sum is rounded once. With "ring" sums also travel in it.
            With "bfloat16" or "float16" every addition of half-precision products is rounded: n ranks are off by up to
            n - 1 roundings, and bits depend on the order that the schedule gives each piece.

    Raises:
        TypeError: an argument of another type.
        ValueError: an unknown name, a count below one, or an argument that its mode would ignore.
    """

    mode: str = "auto"
    pattern: str = "direct"
    splits: int | None = None
    slices: int | None = None
    strict: bool = False
    accumulate_dtype: str = "float32"

    def __post_init__(self) -> None:
        for field, known in (("mode", MODES), ("pattern", ("direct", "ring")), ("accumulate_dtype", DTYPES)):
            value = getattr(self, field)
            if not isinstance(value, str):
                raise TypeError(f"Overlap({field}=...) takes one of {', '.join(known)}, not {value!r}")
            if value not in known:
                raise ValueError(f"Overlap({field}={value!r}): unknown; known: {', '.join(known)}")
        if not isinstance(self.strict, bool):
            raise TypeError(f"Overlap(strict=...) takes True or False, not {self.strict!r}")
        for field in ("splits", "slices"):
            _check_count(field, getattr(self, field))
        decomposed = self.mode in ("auto", "flash")
        if self.splits is not None and not decomposed:
            raise ValueError(
                f"splits={self.splits} means nothing in mode {self.mode!r}; it goes with 'flash' and 'auto'"
            )
        if self.pattern != "direct" and not decomposed:
            raise ValueError(
                f"pattern={self.pattern!r} means nothing in mode {self.mode!r}; it goes with 'flash' and 'auto'"
            )
        if self.slices is not None and self.mode != "slice":
            raise ValueError(f"slices={self.slices} means nothing in mode {self.mode!r}; it goes with 'slice'")

    def __str__(self) -> str:
        parts = [f"mode={self.mode}"]
        if self.mode in ("auto", "flash"):
            parts += [f"pattern={self.pattern}", f"splits={self.splits or 'auto'}"]
        if self.mode == "slice":
            parts.append(f"slices={self.slices or 'auto'}")
        return " ".join([*parts, f"accumulate={self.accumulate_dtype}", *(["strict"] if self.strict else [])])


def _check_count(field: str, count: object) -> None:
    if count is None:
        return
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"Overlap({field}=...) takes a whole number or None, not {count!r}")
    if count < 1:
        raise ValueError(f"Overlap({field}={count}): at least 1 is needed")
