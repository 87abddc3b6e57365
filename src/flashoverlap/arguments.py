"""What commands say of arguments in one way: numbers that are none, and files that could not be written in the end."""

from __future__ import annotations

import os
from pathlib import Path

import typer


def whole(text: str | int) -> int:
    """A whole number, or a usage error that says what was given."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def check_writable(file: Path, made: Path | None = None) -> None:
    """Raises ValueError for a file that could not be written; ``made`` is a folder that is yet to be made."""
    if made is not None and file.parent == made and not made.exists():
        return
    if not file.parent.is_dir():
        raise ValueError(f"{file}: there is no directory {file.parent}")
    if file.is_dir():
        raise ValueError(f"{file} is a directory")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"{file} cannot be written")
