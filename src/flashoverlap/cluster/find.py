"""The cluster that ``--machine`` names: a published device, or the file of a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..machine_file import place, read
from .cluster import Cluster, measured_cluster, published_cluster
from .memory import DTYPES
from .published import PUBLISHED


def usual_dtype(name: str) -> str:
    """What a machine trains in unless told: bfloat16, and on a calibrated one what calibration measured.

    A file that does not say its dtype, as one that was not written by calibration, is taken to hold float32's.

    Raises:
        ValueError: a file that cannot be read, or of a dtype that no step is planned in.
    """
    if name in PUBLISHED or not Path(name).is_file():
        return "bfloat16"
    measured = place(Path(name)).get("dtype", "float32")
    if measured not in DTYPES:
        raise ValueError(
            f"{name} was measured in {measured!r}; --dtype must say in which of {', '.join(DTYPES)} to plan"
        )
    return measured


def find_cluster(name: str, dtype: str, memory_bytes: float | None = None) -> Cluster:
    """The cluster of this name or file.

    Args:
        dtype: whose arithmetic is published; a calibrated machine has that of its calibration, and the source says so
            where that is another.
        memory_bytes: of one device, in place of what is published.

    Raises:
        ValueError: no such name or file, a file that holds no machine, a dtype without a figure.
    """
    if name in PUBLISHED:
        cluster = published_cluster(PUBLISHED[name], dtype)
    elif Path(name).is_file():
        cluster = measured_cluster(read(Path(name)), name, _source(name, place(Path(name)), dtype))
    else:
        raise ValueError(f"no machine or calibration file {name!r}; machines: {', '.join(PUBLISHED)}")
    return cluster if memory_bytes is None else replace(cluster, memory_bytes=memory_bytes)


def _source(name: str, about: Mapping[str, Any], dtype: str) -> str:
    """What a file says of where it holds; calls in another dtype are planned with its matmuls, as mode auto does it."""
    host, measured = (about.get(key, "not said") for key in ("host", "dtype"))
    told = f"measured, {name}: host {host}, dtype {measured}"
    if measured in (dtype, "not said"):
        return told
    return f"{told}; planned in {dtype} all the same, with matmuls as fast as in {measured}"
