"""The operators of a training step: what a device calls in each layer, forward and backward, as the planner takes them.

One layer over ``tp`` and ``up`` ranks; T tokens of a replica, T_u = T / up, H hidden, Q and G features of all queries
and of all keys, F of the MLP, V rows of the vocabulary:

    qkv        up = 1   all_gather_linear            over tp   [T, H] x [H, (Q + 2G) / tp]
               tp = 1   linear_all_to_all            over up   [T_u, H] x [H, (Q + 2G) / up] for each rank of up
               both     all_gather_linear            over tp   [T_u, H] x [H, (Q + 2G) / tp], and then
               both     an all-to-all                over up   of these rows for all rows of Q / (up tp)
    attention  up = 1   attention_reduce_scatter     over tp   a piece of the queries, then [T, Q / tp] x [Q / tp, H]
               tp = 1   attention_all_to_all_linear  over up   queries of each rank of up, then what it projects
               both     attention_all_to_all         over up   queries of each rank of up, and then
               both     linear_reduce_scatter        over tp   [T_u, Q / tp] x [Q / tp, H]
    mlp                 mlp                          over tp   [T_u, H] x [H, F / tp], then [T_u, F / tp] x [F / tp, H]
    embedding           reduce_scatter               over tp   rows looked up
    head                all_gather_linear            over tp   [T_u, H] x [H, V / tp]

Gradients of weights that several ranks have, those of up among them, are those of data parallelism: see step.py.
A query meets as many keys as it does on average: under a causal mask late ones cost more than early ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..patterns import split_sizes
from .memory import Training, local_layer_parameters
from .models import ModelShape
from .split import Split

Sizes = Mapping[str, int | Sequence[int]]


class Operator(NamedTuple):
    """One call of a step.

    Args:
        site: what of the model it is.
        phase: "forward", "recompute" or "backward".
        op: as :func:`flashoverlap.plan.plan` takes it; "" where nothing is moved.
        axis: the group that it is called on, "tp", "up" or "dp" (all that have the same weights, those of up among
            them); "" where nothing is moved.
        sizes: as the planner takes them; where nothing is moved "rows", and "touched" elements of each.
        times: how often a step calls it.
    """

    site: str
    phase: str
    op: str
    axis: str
    sizes: Sizes
    times: int


@dataclass(frozen=True)
class _Part:
    """What the parts of a step need to say of their calls."""

    model: ModelShape
    split: Split
    work: Training
    times: int = field(default=1, init=False)

    @property
    def up_rows(self) -> int:
        """T_u, those of the rank that has most."""
        return split_sizes(self.work.tokens, self.split.up)[0]

    def over_tp(self, site: str, phase: str, op: str, **sizes: int | Sequence[int]) -> Operator:
        """An operator on the rows of a rank of up, spread over tp."""
        return Operator(site, phase, _named(op, phase), "tp", {"rows": self.up_rows, **sizes}, self.times)

    def over_up(self, site: str, phase: str, op: str, **sizes: int | Sequence[int]) -> Operator:
        """An all-to-all of all rows."""
        rows = self.up_rows * self.split.up
        return Operator(site, phase, _named(op, phase), "up", {"rows": rows, **sizes}, self.times)

    def local(self, site: str, phase: str, rows: int, **sizes: int) -> Operator:
        """Kernels that move nothing."""
        return Operator(site, phase, "", "", {"rows": rows, **sizes}, self.times)


def _named(op: str, phase: str) -> str:
    return f"{op} backward" if phase == "backward" else op


@dataclass(frozen=True)
class Ends(_Part):
    """Embedding, head and loss."""

    def forward(self) -> Iterator[Operator]:
        """From tokens to the first layer, and from the last to the loss."""
        yield self.over_tp("embedding", "forward", "reduce_scatter", features=self.model.hidden)
        yield from self._head("forward", 2)  # logits are read for their maximum, and for the sum of exponentials

    def backward(self) -> Iterator[Operator]:
        """From the loss to the last layer, and from the first to the embedding's gradient."""
        yield from self._head("backward", 3)
        yield self.over_tp("embedding", "backward", "reduce_scatter", features=self.model.hidden)

    @property
    def parameters(self) -> int:
        """Elements of embedding, head and last norm on this rank."""
        return -(-self.model.embedding_parameters // self.split.tp) + self.model.hidden

    def _head(self, phase: str, touched: int) -> Iterator[Operator]:
        vocab = -(-self.model.vocab // self.split.tp)
        yield self.over_tp("head", phase, "all_gather_linear", features=self.model.hidden, out=vocab)
        yield self.local("loss", phase, self.up_rows, touched=touched * vocab)


@dataclass(frozen=True)
class Layers(_Part):
    """All layers, each alike."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", self.model.layers)

    def forward(self, phase: str = "forward") -> Iterator[Operator]:
        """What each layer calls; ``phase`` may be "recompute"."""
        own = split_sizes(self.up_rows, self.split.tp)[0]
        # two norms, and two residual additions
        yield self.local("norms", phase, own, touched=10 * self.model.hidden)
        yield from self._qkv(phase)
        yield from self._attention(phase)
        yield self._mlp(phase)

    def backward(self) -> Iterator[Operator]:
        """What each layer calls."""
        own = split_sizes(self.up_rows, self.split.tp)[0]
        yield self._mlp("backward")
        yield from self._attention("backward")
        yield from self._qkv("backward")
        yield self.local("norms", "backward", own, touched=20 * self.model.hidden)

    @property
    def parameters(self) -> int:
        """Elements of one layer on this rank."""
        return round(local_layer_parameters(self.model, self.split.tp))

    def _mlp(self, phase: str) -> Operator:
        hidden = self.model.ffn // self.split.tp
        gated = int(self.model.gated)
        return self.over_tp("mlp", phase, "mlp", features=self.model.hidden, hidden=hidden, gated=gated)

    def _qkv(self, phase: str) -> Iterator[Operator]:
        features, (_, up, tp) = self.model.hidden, self.split
        if tp == 1 and up > 1:
            yield self.over_up("qkv", phase, "linear_all_to_all", features=features, out=self._widths(1, up))
            return
        qkv = self.over_tp("qkv", phase, "all_gather_linear", features=features, out=self._widths(tp, 1))
        yield from _in_order(phase, [qkv, *self._exchange("qkv to heads", phase, self._widths(tp, up))])

    def _attention(self, phase: str) -> Iterator[Operator]:
        model, (_, up, tp) = self.model, self.split
        heads, keys = model.heads // (up * tp), max(1, round(model.mean_keys(self.work.seq)))
        attend, out = {"heads": heads, "head_dim": model.head_dim, "keys": keys}, model.hidden
        if up == 1:
            yield self.over_tp("attention", phase, "attention_reduce_scatter", **attend, out=out)
            return
        if tp == 1:
            yield self.over_up("attention", phase, "attention_all_to_all_linear", **attend, out=out)
            return
        parts = [
            self.over_up("attention", phase, "attention_all_to_all", **attend),
            self.over_tp("out", phase, "linear_reduce_scatter", features=model.q_features // tp, out=out),
        ]
        yield from _in_order(phase, parts)

    def _exchange(self, site: str, phase: str, widths: Sequence[int]) -> Iterator[Operator]:
        """An all-to-all over up with nothing to multiply; its backward is one the other way round."""
        if self.split.up > 1:
            forward = "recompute" if phase == "recompute" else "forward"
            yield self.over_up(site, forward, "linear_all_to_all", features=0, out=widths)._replace(phase=phase)

    def _widths(self, tp: int, up: int) -> tuple[int, int, int]:
        """Features of q, k and v of one rank of tp, which up ranks share; a head of keys that they share is on each."""
        kv = max(self.model.kv_features // tp, self.model.head_dim * up)
        return self.model.q_features // tp, kv, kv


def _in_order(phase: str, parts: Sequence[Operator]) -> Sequence[Operator]:
    return parts[::-1] if phase == "backward" else parts
