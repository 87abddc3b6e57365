"""A training step on a cluster: every operator planned as a real call is, and what they come to together.

Forward and backward of all layers run one operator after another, as they do in the library. Ranks of up have the same
weights, as replicas do: the gradients of all of them, and weights that they share, move beside that (replicas.py). The
optimizer reads and writes its state once. Not counted: reading data, checkpoints, pipeline parallelism (there is none),
and ranks that are slower than others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from .calls import Call, Groups
from .cluster import Cluster
from .memory import Memory, Training, memory_of
from .models import ModelShape
from .operators import Ends, Layers, Operator
from .replicas import Stage, exposed_after, exposed_before
from .split import Split, refusal

HEADROOM = 0.9  # of the memory; the rest is the runtime's, and lost between blocks
_OPTIMIZER_BYTES = 28  # AdamW, each parameter: gradient, float32 copy, two moments in; copy, moments, parameter out


@dataclass(frozen=True)
class Estimate:
    """What a step takes, and what a device holds."""

    model: ModelShape
    cluster: Cluster
    split: Split
    work: Training
    calls: tuple[Call, ...]
    optimizer_s: float
    memory: Memory

    @cached_property
    def seconds(self) -> float:
        """Of a step."""
        return sum((call.compute_s + call.exposed_s) * call.times for call in self.calls) + self.optimizer_s

    @property
    def compute_s(self) -> float:
        """Seconds of a step in which nothing is exposed."""
        return sum(call.compute_s * call.times for call in self.calls) + self.optimizer_s

    @property
    def exposed_s(self) -> float:
        """Seconds that communication adds."""
        return sum(call.exposed_s * call.times for call in self.calls)

    @property
    def hidden(self) -> float:
        """Share of the communication that is hidden: of what it would add with nothing overlapped."""
        plain_s = sum(call.plain_s * call.times for call in self.calls)
        return 1 - self.exposed_s / plain_s if plain_s else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Of all replicas together."""
        return self.tokens / self.seconds

    @property
    def tokens(self) -> int:
        """Of all replicas in one step."""
        return self.split.dp * self.work.micro_batches * self.work.tokens

    @property
    def mfu(self) -> float:
        """Share of the devices' peak that the model's own arithmetic comes to."""
        flops = self.model.flops_per_token(self.work.seq) * self.tokens
        return flops / (self.seconds * self.cluster.peak_flops_per_s * self.split.devices)

    @property
    def fits(self) -> bool | None:
        """Whether a device has memory for it; None where its memory is not known."""
        if self.cluster.memory_bytes is None:
            return None
        return self.memory.total <= HEADROOM * self.cluster.memory_bytes

    def as_json(self) -> dict[str, Any]:
        """All of it in plain types."""
        return {
            "model": self.model.name,
            "machine": self.cluster.name,
            "source": self.cluster.source,
            "assumed": None if self.cluster.assumed is None else asdict(self.cluster.assumed),
            "split": self.split._asdict(),
            **asdict(self.work),
            "tokens": self.tokens,
            "step_seconds": self.seconds,
            "compute_seconds": self.compute_s,
            "exposed_seconds": self.exposed_s,
            "communication_hidden": self.hidden,
            "mfu": self.mfu,
            "tokens_per_s": self.tokens_per_s,
            "memory_bytes": {**asdict(self.memory), "total": self.memory.total, "device": self.cluster.memory_bytes},
            "fits": self.fits,
            "operators": [call._asdict() for call in self.calls],
        }


def estimate(model: ModelShape, cluster: Cluster, split: Split, work: Training) -> Estimate:
    """Plans every operator of a step.

    Raises:
        ValueError: the model cannot be split so.
    """
    refused = refusal(model, split, work.tokens)
    if refused is not None:
        raise ValueError(f"{model.name} over {split}: {refused.reason}")
    calls = tuple(_Step(model, cluster, split, work).calls())
    memory = memory_of(model, split, work)
    stepped = memory.optimizer / work.optimizer_bytes
    optimizer_s = stepped * _OPTIMIZER_BYTES / cluster.matmul.memory_bytes_per_s
    return Estimate(model, cluster, split, work, calls, optimizer_s, memory)


class _Step:
    """The calls of one step."""

    def __init__(self, model: ModelShape, cluster: Cluster, split: Split, work: Training) -> None:
        self.model, self.split, self.work = model, split, work
        self.groups = Groups(cluster, split, work.dtype)
        self.ends, self.layers = Ends(model, split, work), Layers(model, split, work)

    def calls(self) -> Iterator[Call]:
        """All calls; those of every micro-batch are counted as often."""
        call = self.groups.call
        embedding, *head = map(call, self.ends.forward())
        forward = [call(operator) for operator in self.layers.forward()]
        again = [call(operator) for operator in self.layers.forward("recompute")] if self.work.recompute else []
        backward = again + [call(operator) for operator in self.layers.backward()]
        last = [call(operator) for operator in self.ends.backward()]
        weights = list(self._weights(forward, backward))
        for each in (embedding, *forward, *head, *backward, *last, *weights):
            once = each in weights and self.work.shard == "gradients"
            yield each._replace(times=each.times * (1 if once else self.work.micro_batches))
        if self.split.copies > 1:
            yield from self._gradients(backward)

    def _weights(self, forward: Sequence[Call], backward: Sequence[Call]) -> Iterator[Call]:
        """Weights of which each rank keeps or steps a part, gathered while the layer before is computed."""
        if self.split.copies == 1 or self.work.shard == "none":
            return
        phases = {"forward": forward, "backward": backward} if self.work.shard == "parameters" else {"forward": forward}
        for phase, beside in phases.items():
            gather = self._between_copies("weights", phase, "all_gather", self.layers)
            each = self.groups.transfers([gather], "comes while the layer before is computed")
            stage = Stage(self._idle_s(beside), each.seconds)
            yield each._replace(exposed_s=exposed_before([stage] * self.model.layers) / self.model.layers)

    def _gradients(self, backward: Sequence[Call]) -> Iterator[Call]:
        """Gradients, summed where each rank that has them keeps its part, and gathered where each needs all."""
        ops = ("reduce_scatter", "all_gather") if self.work.shard == "none" else ("reduce_scatter",)
        why = "flies while earlier layers are computed"
        each, ends = (
            self.groups.transfers([self._between_copies(site, "backward", op, part) for op in ops], why)
            for site, part in (("gradients", self.layers), ("end gradients", self.ends))
        )
        stage = Stage(self._idle_s(backward), each.seconds)
        end = Stage(0.0, ends.seconds / 2)  # the head's gradients leave first, the embedding's last
        left_s = exposed_after([end, *[stage] * self.model.layers, end])
        total_s = self.model.layers * each.seconds + ends.seconds
        share = left_s / total_s if total_s else 0.0
        for call in (each, ends):
            yield call._replace(exposed_s=share * call.seconds)

    def _between_copies(self, site: str, phase: str, op: str, part: Ends | Layers) -> Operator:
        """Elements of a part as rows, as many for each copy: ranks are then alike, and one is replayed for all."""
        rows = -(-part.parameters // (self.model.hidden * self.split.copies)) * self.split.copies
        sizes = {"rows": rows, "features": -(-part.parameters // rows)}
        return Operator(site, phase, op, "dp", sizes, part.times)

    def _idle_s(self, layer: Sequence[Call]) -> float:
        """Seconds of a layer in which the wires between replicas are free of what the layer itself moves."""
        seconds = sum(call.compute_s + call.exposed_s for call in layer)
        taken = (call.plain_s for call in layer if call.axis and self.groups.share_a_wire(call.axis, "dp"))
        return max(0.0, seconds - sum(taken))
