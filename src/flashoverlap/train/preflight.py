"""What can be refused before anything starts: files that are missing, text that does not suffice, a folder in use."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..arguments import check_writable
from ..checkpoint_folder import CheckpointFolder
from .configuration import check_length, difference, fields_of, read_configuration
from .options import Options
from .text import Text


def check(options: Options) -> Text:
    """Checks all that the options name but the model, writes nothing, and returns the text.

    Raises:
        ValueError: one line on what is wrong, with the value.
    """
    for module in ("transformers", *(["matplotlib"] if options.out is not None else [])):
        if find_spec(module) is None:
            raise ValueError(f"{module} is not installed: pip install 'flashoverlap[train]'")
    for file in (options.json, options.trace):
        if file is not None:
            check_writable(file, options.out)
    if options.out is not None:
        _check_folder(options.out, options.resume)
    text = Text.read(options.data)
    batch = f"--batch {options.batch} x --accumulate {options.accumulate} x --seq {options.seq}"
    text.check(options.tokens_per_step, batch)
    return text


def check_model(options: Options) -> Any:
    """Checks the model, and that it is the one of the checkpoint to resume from; returns its configuration.

    This loads torch and transformers, which takes seconds.

    Raises:
        ValueError: one line on what is wrong, with the value.
    """
    configuration = read_configuration(options.model)
    check_length(options.model, configuration, options.seq)
    if options.resume:
        _check_resume(options, configuration)
    return configuration


def _check_folder(out: Path, resume: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: a file is there, a folder is needed")
    if resume and not out.is_dir():
        raise ValueError(f"--out {out}: there is no such folder to resume from")
    if not resume and out.is_dir() and any(out.iterdir()):
        raise ValueError(f"--out {out}: the folder is not empty; name another, or go on from it with --resume")
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise ValueError(f"--out {out}: {existing} is a file, not a folder")
    if not os.access(existing, os.W_OK):
        raise ValueError(f"--out {out}: {existing} cannot be written")


def _check_resume(options: Options, configuration: Any) -> None:
    assert options.out is not None
    folder = CheckpointFolder(options.out)
    if not folder.is_run:
        raise ValueError(f"--out {options.out}: no training run is there to resume")
    latest = folder.latest()
    if latest is None:
        return  # ended before its first checkpoint: begins anew
    told = difference(fields_of(configuration), latest.model)
    if told is not None:
        raise ValueError(f"--resume: {latest.path} is of another model: {told}; give --model as before")
    if latest.step >= options.steps:
        raise ValueError(f"--steps {options.steps}: {latest.path} has done {latest.step} already")
