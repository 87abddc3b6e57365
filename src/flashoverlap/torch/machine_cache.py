"""Machines that were measured before, kept in a folder: a file for each place where one holds."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import __version__, machine_file
from ..machine import Machine

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def default_folder() -> Path:
    """Where machines are kept unless told otherwise: in the user's cache, wherever the desktop's rules say that is."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".cache") / "flashoverlap"


def number_of(text: str) -> float:
    """A number that stands for a text between ranks; exact as a float."""
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big"))


def host_number() -> float:
    """The same for all processes on one host that is up, and no other."""
    boot = _BOOT.read_text() if _BOOT.exists() else ""
    return number_of(f"{platform.node()} {boot}")


def folder_number(folder: Path) -> float:
    """The same for all processes that see one folder."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        status = folder.stat()
        return number_of(f"{host_number()} {status.st_dev} {status.st_ino}")
    return -1.0


def place(
    transport: Any, dtype: torch.dtype, device: torch.device, hosts: Sequence[float], nodes: Sequence[int]
) -> dict[str, Any]:
    """What a machine depends on, as plain JSON; ``hosts`` are the numbers of all ranks' hosts."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "host": platform.node(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": f"{device.type} {name}",
        "backend": type(transport).__name__.lower(),
        "ranks": transport.world_size,
        "members": list(transport.members),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "flashoverlap": __version__,
        "hosts": [hosts.index(host) for host in hosts],
        "nodes": list(nodes),
    }


class Kept(NamedTuple):
    """What a folder has for a place: the machine, or None; and why a file that is there cannot be used, or ""."""

    machine: Machine | None
    complaint: str


def path_of(folder: Path, about: Mapping[str, Any]) -> Path:
    """The file of a place."""
    digest = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=8).hexdigest()
    return folder / f"machine-{digest}.json"


def find(folder: Path, about: Mapping[str, Any]) -> Kept:
    """The machine that is kept for a place."""
    path = path_of(folder, about)
    try:
        return Kept(machine_file.read(path, about), "")
    except (FileNotFoundError, NotADirectoryError):
        return Kept(None, "")
    except (OSError, ValueError) as error:
        return Kept(None, str(error))


def keep(folder: Path, about: Mapping[str, Any], machine: Machine) -> str:
    """Writes the machine of a place; returns why it could not be written, or ""."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        machine_file.write(path_of(folder, about), machine, about)
    except OSError as error:
        return str(error)
    return ""
