"""Where checkpoints lie: which is the last whole one, and how a new one takes its place. No torch.

    DIR/run.json                          that this folder is a training run's; written first
    DIR/config.json                       the model's configuration, as transformers reads it
    DIR/metrics.jsonl, DIR/loss.png, DIR/report.txt
    DIR/checkpoints/step-00000050/        of torch.distributed.checkpoint, under "model" and "optimizer"
        config.json                       once more, so that a checkpoint can be taken elsewhere
        training.json                     step, seed, and what the model is

[Note: a kill at any moment] A checkpoint is written under another name, ``.step-00000050.partial``. Once all ranks have
written and rank 0 has flushed every file to the disk, one rename makes it a checkpoint; only then are older ones
removed. A kill leaves the last checkpoint whole, and at most a partial one beside it, which the next run removes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEPT = 2
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint.

    Args:
        path: its folder.
        step: steps that were done.
        model: fields of the model's configuration.
        settings: options of the run that wrote it, which a run that goes on may change.
    """

    path: Path
    step: int
    model: dict[str, Any]
    settings: dict[str, Any]

    @staticmethod
    def read(path: Path) -> Checkpoint:
        """Reads what a checkpoint says of itself.

        Raises:
            ValueError: it does not say it, or not in words of this version.
        """
        try:
            content = json.loads((path / "training.json").read_text(encoding="utf-8"))
            return Checkpoint(path, content["step"], content["model"], content["settings"])
        except (OSError, ValueError, KeyError, TypeError):
            raise ValueError(f"{path}: training.json is missing or damaged") from None


class CheckpointFolder:
    """The folder of one run."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._root = out / "checkpoints"

    @property
    def is_run(self) -> bool:
        """Whether a training run was begun here."""
        return (self.out / "run.json").is_file()

    def begin(self, configuration: Any, options: Mapping[str, Any]) -> None:
        """Makes the folder a run's (on one rank), and removes what a kill left unfinished."""
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "run.json").write_text(json.dumps(options, indent=1) + "\n", encoding="utf-8")
        configuration.to_json_file(str(self.out / "config.json"), use_diff=False)
        for partial in self._root.glob(".*.partial"):
            shutil.rmtree(partial)

    def all(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        if not self._root.is_dir():
            return []
        found = [(int(match[1]), path) for path in self._root.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(found)]

    def latest(self) -> Checkpoint | None:
        """The last whole checkpoint; None where there is none yet."""
        found = self.all()
        return Checkpoint.read(found[-1]) if found else None

    def partial(self, step: int) -> Path:
        """Where a checkpoint is written at first."""
        return self._root / f".{self._name(step)}.partial"

    def publish(self, step: int, configuration: Any, model: Mapping[str, Any], settings: Mapping[str, Any]) -> Path:
        """Makes a checkpoint of what all ranks have written (on one rank); see [Note: a kill at any moment]."""
        partial, path = self.partial(step), self._root / self._name(step)
        configuration.to_json_file(str(partial / "config.json"), use_diff=False)
        content = {"step": step, "settings": settings, "model": model}
        (partial / "training.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        for file in [*partial.iterdir(), partial]:
            _flush(file)
        partial.rename(path)
        _flush(self._root)
        for older in self.all()[:-KEPT]:
            # renamed first: a kill while it is removed must not leave half a checkpoint under a whole one's name
            shutil.rmtree(older.rename(older.with_name(f".{older.name}.partial")))
        return path

    @staticmethod
    def _name(step: int) -> str:
        return f"step-{step:08d}"


def _flush(path: Path) -> None:
    """Has the disk hold what was written to a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
