"""What users would pick instead: one file a peer, which holds its contestants by case and is imported late."""

from __future__ import annotations

from importlib.util import find_spec


def missing(peer: str) -> str | None:
    """What to say of a peer that is not installed; None where it is."""
    if peer != "megatron":
        return None
    try:
        found = find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        found = False
    return None if found else "megatron: not installed (pip install flashoverlap[peers])"
