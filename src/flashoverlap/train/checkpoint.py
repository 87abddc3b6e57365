"""Saving and loading through torch.distributed.checkpoint, on any number of ranks."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..checkpoint_folder import Checkpoint, CheckpointFolder
from .configuration import fields_of
from .options import Options
from .ranks import Ranks
from .screen import Screen
from .step import Training

# what a checkpoint says of the run that wrote it: with other values a run goes on, but not as it would have
_SETTINGS = (
    "seed", "data", "batch", "seq", "accumulate", "steps", "lr", "warmup", "clip", "dtype", "overlap", "splits",
    "slices", "attention", "activation_checkpointing", "shard",
)  # fmt: skip


class Checkpoints:
    """The checkpoints of one run; all ranks call together. Without ``--out`` there are none.

    Args:
        options: of the run.
        configuration: of the model.
        ranks: that take part.
    """

    def __init__(self, options: Options, configuration: Any, ranks: Ranks) -> None:
        self._folder = None if options.out is None else CheckpointFolder(options.out)
        self._options, self._configuration, self._ranks = options, configuration, ranks
        self._settings = {name: _plain(getattr(options, name)) for name in _SETTINGS}
        self._settings |= {"overlap": options.mode, "ranks": ranks.count, **vars(ranks.degrees)}

    def begin(self, training: Training, screen: Screen) -> int:
        """Makes the folder a run's, and gives the training the state of the last checkpoint to resume from, if there
        is one; returns the number of the first step to take."""
        if self._folder is None:
            return 0
        latest = self._folder.latest() if self._options.resume else None
        dist.barrier(group=self._ranks.control)  # until all have looked
        if self._ranks.rank == 0:
            every = {each.name: _plain(getattr(self._options, each.name)) for each in fields(self._options)}
            self._folder.begin(self._configuration, every)
        dist.barrier(group=self._ranks.control)
        if latest is None:
            if self._options.resume:
                screen.say(f"{self._options.out} has no checkpoint yet: beginning with step 1")
            return 0
        state = training.state()
        try:
            load(state, checkpoint_id=latest.path, process_group=self._ranks.control)
        except Exception as error:  # torch raises what it likes where files are damaged, on all ranks together
            first = str(error).strip().partition("\n")[0]
            raise ValueError(f"--resume: {latest.path} cannot be read: {first or type(error).__name__}") from None
        training.load_state(state)
        screen.say(f"resumed from {latest.path}{self._changed(latest)}")
        return latest.step

    def due(self, done: int) -> bool:
        """Whether a checkpoint is to be written after so many steps."""
        return self._folder is not None and (
            done % self._options.steps_per_checkpoint == 0 or done == self._options.steps
        )

    def save(self, training: Training, done: int) -> None:
        """Writes a checkpoint after ``done`` steps; see [Note: a kill at any moment]."""
        assert self._folder is not None
        save(training.state(), checkpoint_id=self._folder.partial(done), process_group=self._ranks.control)
        dist.barrier(group=self._ranks.control)
        if self._ranks.rank == 0:
            self._folder.publish(done, self._configuration, fields_of(self._configuration), self._settings)
        dist.barrier(group=self._ranks.control)

    def _changed(self, checkpoint: Checkpoint) -> str:
        """Settings that differ from those of the run that wrote a checkpoint, in words."""
        old, new = checkpoint.settings, self._settings
        changed = [f"{name} {old.get(name)} -> {value}" for name, value in new.items() if old.get(name) != value]
        return f"; it goes on with other settings: {', '.join(changed)}" if changed else ""


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
