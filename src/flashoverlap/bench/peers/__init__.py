"""What users would pick instead: one file a peer, which holds its contestants by case and is imported late."""

from __future__ import annotations

from importlib.util import find_spec

_NEEDS = {
    "megatron": ("megatron.core", "pip install flashoverlap[peers]"),
    "hf": ("accelerate", "pip install flashoverlap[peers]"),
}


def missing(peer: str) -> str | None:
    """What to say of a peer that is not installed; None where it is."""
    if peer not in _NEEDS:
        return None
    package, advice = _NEEDS[peer]
    try:
        found = find_spec(package) is not None
    except ModuleNotFoundError:
        found = False
    return None if found else f"{peer}: not installed ({advice})"
