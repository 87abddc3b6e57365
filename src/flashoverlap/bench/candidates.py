"""The runs that a mode stands for: one, or several of which the best counts."""

from __future__ import annotations

from dataclasses import dataclass

from ..overlap import Overlap
from .options import Options

SPLITS = (1, 2, 4, 8)
BUCKETS = {"ddp": ("buckets as by default", "buckets of 8 MB, gradients are views of them")}


@dataclass(frozen=True)
class Candidate:
    """One thing to time.

    Args:
        row: the row of the table that it stands in.
        overlap: how the library's operators are called; None for a peer.
        note: what is added to the row's detail.
        silent: whether nothing is moved.
        variant: which of several ways the case or the peer has; "" for its usual one.
    """

    row: str
    overlap: Overlap | None = None
    note: str = ""
    silent: bool = False
    variant: str = ""


def candidates(options: Options) -> list[Candidate]:
    """All that is timed, row by row: compute and off first, then the other modes and the peers as asked for."""
    rows = [Candidate("compute", Overlap("off"), silent=True), Candidate("off", Overlap("off"))]
    for mode in options.modes:
        if mode not in ("compute", "off"):
            rows += _of_mode(mode, options)
    for variant in options.shape.variants:
        rows += [Candidate(variant, one.overlap, one.note, variant=variant) for one in _of_mode("flash", options)]
    for peer in options.peers:
        variants = BUCKETS.get(peer, ("",))
        note = f"best of {len(variants)}" if len(variants) > 1 else ""
        rows += [Candidate(peer, note=note, variant=variant) for variant in variants]
    return rows


def _of_mode(mode: str, options: Options) -> list[Candidate]:
    if mode == "slice":
        tried = options.shape.slices_on(options.ranks)
        note = f"best of {', '.join(map(str, tried))}" if len(tried) > 1 else ""
        return [Candidate(mode, Overlap(mode, slices=slices), note) for slices in tried]
    if mode == "collective":
        return [Candidate(mode, Overlap(mode))]
    pattern = options.pattern
    if mode == "auto" or options.splits == "auto":
        return [Candidate(mode, Overlap(mode, pattern=pattern))]
    if options.splits == "best":
        note = f"best of {', '.join(map(str, SPLITS))}"
        return [Candidate(mode, Overlap(mode, pattern=pattern, splits=splits), note) for splits in SPLITS]
    return [Candidate(mode, Overlap(mode, pattern=pattern, splits=int(options.splits)))]
