"""What users would pick instead: one file a peer, which holds its contestants by case and is imported late."""

from __future__ import annotations

from importlib.util import find_spec

_NEEDS = {
    "megatron": ("megatron.core",),
    "hf": ("accelerate",),
    "deepspeed": ("deepspeed", "einops"),
    "yunchang": ("yunchang",),
}


def missing(peer: str) -> str | None:
    """What to say of a peer that is not installed; None where it is. Nothing is imported."""
    if all(map(_installed, _NEEDS.get(peer, ()))):
        return None
    return f"{peer}: not installed (pip install flashoverlap[peers])"


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
