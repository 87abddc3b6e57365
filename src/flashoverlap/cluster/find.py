"""The cluster that ``--machine`` names: a published device, or the file of a calibration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..machine_file import read
from .cluster import Cluster, measured_cluster, published_cluster
from .published import PUBLISHED


def usual_dtype(name: str) -> str:
    """What a machine trains in unless told: bfloat16, and on a calibrated one what calibration measured."""
    return "bfloat16" if name in PUBLISHED else "float32"


def find_cluster(name: str, dtype: str, memory_bytes: float | None = None) -> Cluster:
    """The cluster of this name or file.

    Args:
        dtype: whose arithmetic is published; a calibrated machine has that of its calibration.
        memory_bytes: of one device, in place of what is published.

    Raises:
        ValueError: no such name or file, a file that holds no machine, a dtype without a figure.
    """
    if name in PUBLISHED:
        cluster = published_cluster(PUBLISHED[name], dtype)
    elif Path(name).is_file():
        cluster = measured_cluster(read(Path(name)), name)
    else:
        raise ValueError(f"no machine or calibration file {name!r}; machines: {', '.join(PUBLISHED)}")
    return cluster if memory_bytes is None else replace(cluster, memory_bytes=memory_bytes)
