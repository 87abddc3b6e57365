"""All ways to divide a number of devices into dp, up and tp, ranked by what a step on them reaches."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

from .cluster import Cluster
from .memory import Memory, Training, memory_of
from .models import ModelShape
from .split import Refusal, Split, refusal, splits_of
from .step import HEADROOM, Estimate, estimate


class Misfit(NamedTuple):
    """A split that was not estimated: impossible, or more than a device holds."""

    split: Split
    code: str
    reason: str


class Sweep(NamedTuple):
    """Splits that fit by the tokens a second that they reach, and those that do not."""

    devices: int
    estimates: list[Estimate]
    misfits: list[Misfit]

    def as_json(self) -> dict[str, Any]:
        """All of it in plain types, operators left out."""
        estimates = [each.as_json() for each in self.estimates]
        for each in estimates:
            del each["operators"]
        misfits = [{**each._asdict(), "split": each.split._asdict()} for each in self.misfits]
        return {"devices": self.devices, "splits": estimates, "misfits": misfits}

    def counts(self) -> Counter[str]:
        """How many do not fit, by code."""
        return Counter(each.code for each in self.misfits)


def sweep(model: ModelShape, cluster: Cluster, devices: int, work: Training, global_batch: int | None = None) -> Sweep:
    """Estimates every split that is possible and that memory has room for.

    Args:
        work: of each replica.
        global_batch: sequences of all replicas in a step, each taking as many micro-batches as that needs. Without it
            each replica takes those of ``work``, so that more replicas train on more tokens in a step.
    """
    estimates: list[Estimate] = []
    misfits: list[Misfit] = []
    for split in splits_of(devices):
        each = replace(work, micro_batches=max(1, (global_batch or 0) // (split.dp * work.batch)))
        refused = _misfit(model, cluster, split, each, global_batch)
        if refused is None:
            estimates.append(estimate(model, cluster, split, each))
        else:
            misfits.append(Misfit(split, *refused))
    estimates.sort(key=lambda each: -each.tokens_per_s)
    return Sweep(devices, estimates, misfits)


def _misfit(
    model: ModelShape, cluster: Cluster, split: Split, work: Training, global_batch: int | None
) -> Refusal | None:
    """Why a split is not estimated, if it is not."""
    refused = refusal(model, split, work.tokens)
    if refused is not None:
        return refused
    if global_batch is not None and split.dp * work.batch * work.micro_batches != global_batch:
        at_once = f"{split.dp} replicas of {work.batch} at a time"
        return Refusal("batch", f"{global_batch} sequences are no whole number of micro-batches of {at_once}")
    memory = memory_of(model, split, work)
    if cluster.memory_bytes is not None and memory.total > HEADROOM * cluster.memory_bytes:
        return Refusal("memory", _too_much(memory, cluster.memory_bytes))
    return None


def _too_much(memory: Memory, device_bytes: float) -> str:
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations + memory.buffers,
    }
    told = ", ".join(f"{name} {nbytes / 1e9:.1f}" for name, nbytes in parts.items())
    return f"{memory.total / 1e9:.1f} GB ({told}) on devices of {device_bytes / 1e9:g} GB, {HEADROOM:.0%} of it usable"
