"""A machine in a file: what calibration measured, and where that holds, as JSON that is checked when it is read."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from .machine import Machine

# [Note: version of a file] Raised whenever a machine has got a new number, even one with a default: a file without it
# says nothing of what it stands for, and would be read as if that had been measured to cost nothing.
FORMAT, VERSION = "flashoverlap machine", 3


def write(path: Path, machine: Machine, about: Mapping[str, Any]) -> None:
    """Writes a machine, as a whole or not at all.

    Args:
        path: the file; its folder must be there.
        machine: what is written. Every number is read back with the same bits.
        about: where the machine holds, as plain JSON: :func:`read` can insist on it.

    Raises:
        OSError: the file cannot be written.
    """
    content = {"format": FORMAT, "version": VERSION, "about": dict(about), "machine": _encoded(machine)}
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read(path: Path, about: Mapping[str, Any] | None = None) -> Machine:
    """The machine of a file that :func:`write` wrote.

    Args:
        path: the file.
        about: where the machine is to hold; every entry must be the file's.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no machine, one of another version or of another place, or numbers out of range; the
            message names the file and what is wrong with it.
    """
    with _naming(path):
        content = _content(path)
        _check_about(_about(content), about or {})
        return _decoded(Machine, content.get("machine"), "machine")


def place(path: Path) -> Mapping[str, Any]:
    """Where the machine of a file holds: what :func:`write` was told, as far as the file says it.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no machine, or one of another version.
    """
    with _naming(path):
        return _about(_content(path))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Names the file in every error of what it holds: no JSON, no UTF-8, numbers too large, nesting too deep."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise ValueError(f"machine file {path}: {error}") from None
    except RecursionError:
        raise ValueError(f"machine file {path}: it is nested too deeply") from None


def _content(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError("it is none of a machine")
    if content.get("version") != VERSION:
        raise ValueError(f"it has version {content.get('version')!r}, and {VERSION} can be read")
    return content


def _about(content: Mapping[str, Any]) -> Mapping[str, Any]:
    about = content.get("about")
    return about if isinstance(about, dict) else {}


def _check_about(written: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    others = [
        f"{name} {written.get(name)!r}, not {value!r}" for name, value in wanted.items() if written.get(name) != value
    ]
    if others:
        raise ValueError(f"it was measured elsewhere: {', '.join(others)}")


def _encoded(value: Any) -> Any:
    """Dataclasses as objects, tuples as lists; an infinite number, which JSON lacks, as a word."""
    if is_dataclass(value):
        return {field.name: _encoded(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: _encoded(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_encoded(item) for item in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _decoded(kind: Any, value: Any, where: str) -> Any:
    """The value of a type, as far as machines have such; ValueError, naming the place, where it is none."""
    outer, inner = get_origin(kind), get_args(kind)
    if outer in (Union, UnionType):
        (kind,) = (one for one in inner if one is not NoneType)
        return None if value is None else _decoded(kind, value, where)
    if is_dataclass(kind) and isinstance(value, dict):
        return _decoded_fields(kind, value, where)
    if outer is tuple and isinstance(value, list):
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) == len(value):
            numbered = enumerate(zip(kinds, value, strict=True))
            return tuple(_decoded(one, item, f"{where}[{number}]") for number, (one, item) in numbered)
    elif outer is not None and isinstance(value, dict):
        return {name: _decoded(inner[1], item, f"{where}.{name}") for name, item in value.items()}
    elif kind is float and (value == "inf" or type(value) in (int, float)):
        return float(value)
    elif isinstance(kind, type) and type(value) is kind:
        return value
    raise ValueError(f"{where} cannot be {value!r}")


def _decoded_fields(kind: Any, value: dict[str, Any], where: str) -> Any:
    hints, known = get_type_hints(kind), {field.name: field for field in fields(kind)}
    unknown = sorted(value.keys() - known.keys())
    missing = [
        name
        for name, field in known.items()
        if name not in value and field.default is MISSING and field.default_factory is MISSING
    ]
    if unknown or missing:
        said = [f"has {', '.join(unknown)}, which is not known"] * bool(unknown)
        said += [f"lacks {', '.join(missing)}"] * bool(missing)
        raise ValueError(f"{where} {' and '.join(said)}")
    return kind(**{name: _decoded(hints[name], item, f"{where}.{name}") for name, item in value.items()})
