"""What an operator's call is made of, from its sizes: its flow, bytes of a row, and the matmuls of each kernel.

M rows in all, K features, N features out, F hidden, n ranks; sharded sizes are those of one rank. ``[m, k] x [k, n]``
of a kernel is written as ``k > n``, its m being the rows that it reads; ``k >> n`` where it is summed over the rows.

    operator (rank's sizes)                       forward                             backward
    all_gather_linear          features, out      mm K > N                            mm N > K      wgrad N >> K
    linear_reduce_scatter      features, out      mm K > N                            mm N > K      wgrad N >> K
    linear_all_reduce          features, out      mm K > N
    all_reduce_grad_linear     features, out                                          mm N > K      wgrad N >> K
    mlp                        features, hidden,  up K > F (twice if gated)           down N > F    wgrad_down N >> F
                               out                down F > N                          up F > K      wgrad_up F >> K
    attention_reduce_scatter   heads, head_dim,   mm HD > T > HD > N                  mm N > HD, 5 x HD > T
                               keys, out                                              wgrad N >> HD
    linear_all_to_all          features, out      mm K > N / n                        mm N / n > K  wgrad N / n >> K
    all_to_all_linear          features, out      mm K > N                            mm N > K      wgrad N >> K
    attention_all_to_all_linear  heads, head_dim, attend HD > T > HD                  mm N > HD     wgrad N >> HD
                               keys, out          mm HD > N                           attend_backward 5 x HD > T
    attention_all_to_all       heads, head_dim,   attend HD > T > HD                  attend_backward 5 x HD > T
                               keys
    grad_reduce_scatter        features, tokens   wgrad tokens > K, by rows of the weight
    param_all_gather           features, tokens   mm K > tokens, by rows of the weight
    all_gather, reduce_scatter, all_reduce        features only: nothing is computed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .flow import flow_of, of_tensor
from .machine import Kernel, Machine
from .matmul import Attention, Product

# The flows of an operator, forward and backward.
OPERATORS: Mapping[str, tuple[str, str]] = {
    "all_gather_linear": ("all_gather_matmul", "column_backward"),
    "linear_reduce_scatter": ("matmul_reduce_scatter", "row_backward"),
    "linear_all_reduce": ("all_reduce", ""),
    "all_reduce_grad_linear": ("", "all_reduce_backward"),
    "mlp": ("mlp", "mlp_backward"),
    "attention_reduce_scatter": ("matmul_reduce_scatter", "row_backward"),
    "linear_all_to_all": ("all_to_all", "all_to_all_backward"),
    "all_to_all_linear": ("all_to_all_matmul", "all_to_all_matmul_backward"),
    "attention_all_to_all_linear": ("attention_all_to_all", "attention_all_to_all_backward"),
    "attention_all_to_all": ("attention_all_to_all", "attention_all_to_all_backward-w"),
    "all_gather": ("all_gather_matmul", "matmul_reduce_scatter"),
    "reduce_scatter": ("matmul_reduce_scatter", "all_gather_matmul"),
}


# The layers of a whole MLP as flows of their own, and which kernel of the whole each of their kernels is.
LAYERS: Mapping[str, Sequence[tuple[str, Mapping[str, str]]]] = {
    "mlp": (("all_gather_matmul", {"mm": "up"}), ("matmul_reduce_scatter", {"mm": "down"})),
    "mlp_backward": (
        ("row_backward", {"mm": "down", "wgrad": "wgrad_down"}),
        ("column_backward", {"mm": "up", "wgrad": "wgrad_up"}),
    ),
}


class Step(NamedTuple):
    """One matmul of a kernel: its rows times ``[k, n]``; summed over the rows; or, turned, ``[n, k]`` times them."""

    k: int
    n: int
    summed: bool = False
    turned: bool = False


class Heads(NamedTuple):
    """Attention of a kernel's rows to ``keys``, with ``features`` of all heads of a rank."""

    features: int
    keys: int
    causal: bool = False
    backward: bool = False


class Values(NamedTuple):
    """What a kernel does for each row beside matmuls: values read and written, and activation functions."""

    touched: int = 0
    activations: int = 0


@dataclass(frozen=True)
class Workload:
    """One call of an operator, without its rows.

    Args:
        flow: its flow, with outputs left out by ``-letter``.
        widths: features of a row by letter of the piece.
        kernels: matmuls of each kernel, and its attention.
        values: what else each kernel does.
        tensors: how many move side by side.
    """

    flow: str
    widths: Mapping[str, int]
    kernels: Mapping[str, Sequence[Step | Heads]]
    values: Mapping[str, Values]
    tensors: int = 1

    def row_bytes(self, itemsize: int, travels: int) -> dict[str, int]:
        """Bytes of a row by letter; partial sums travel with ``travels`` bytes a value."""
        sums = bool(flow_of(self.flow).reduce) and flow_of(self.flow).swap is None
        return {
            letter: width * (travels if sums and letter == "p" else itemsize) for letter, width in self.widths.items()
        }

    def on(self, machine: Machine, rows: int, itemsize: int) -> Machine:
        """The machine with the kernels of this call, made of its matmuls where it has none of that name.

        Raises:
            ValueError: it has neither.
        """
        matmul, flow = machine.matmul, flow_of(self.flow)
        if matmul is None:
            for kernel in (*flow.kernels, *(w.kernel for w in flow.wgrads)):
                machine.kernel(kernel)
            return machine
        blind = {w.kernel for w in flow.wgrads if not w.reads}  # reads what no schedule names: all rows
        made: dict[str, Kernel] = {}
        for name, steps in self.kernels.items():
            products = tuple(
                Product(matmul, *step[:2], itemsize, *step[2:]) for step in steps if isinstance(step, Step)
            )
            attention = [Attention(matmul, *step, itemsize) for step in steps if isinstance(step, Heads)]
            touched, activations = self.values.get(name, Values())
            row_s = touched * itemsize / matmul.memory_bytes_per_s + activations * matmul.activation_s
            kernel = Kernel(0.0, row_s, products, *attention)
            made[name] = Kernel(kernel.seconds(rows)) if name in blind else kernel
        add = machine.add
        if add == Kernel():
            add = Kernel(0.0, 3 * self.widths.get("z", 0) * itemsize / matmul.memory_bytes_per_s)
        return machine.with_kernels(made, add)


def workload(op: str, sizes: Mapping[str, int | Sequence[int]], ranks: int) -> Workload:
    """The workload of an operator (``"mlp"``, ``"mlp backward"``) or a flow (``"mlp_backward-w"``) of these sizes.

    Raises:
        ValueError: an operator or a size that is not known, or a size that is missing or negative.
    """
    flow = _flow(op)
    base = flow.partition("-")[0]
    given = _Sizes(op, sizes)
    widths, kernels, values = _PARTS[base](given, ranks)
    given.check_all_taken()
    return Workload(flow, widths, kernels, values, given.tensors)


def layers_of(work: Workload) -> list[Workload]:
    """The layers of a call that can run one after the other, each as a call of its own; none of other calls."""
    widths = {**work.widths, "y": work.widths.get("h", 0)}
    return [
        Workload(
            flow,
            widths,
            {name: work.kernels[whole] for name, whole in kernels.items()},
            {name: work.values[whole] for name, whole in kernels.items() if whole in work.values},
        )
        for flow, kernels in LAYERS.get(work.flow, ())
    ]


def along_features(op: str, sizes: Mapping[str, int | Sequence[int]], rows: int) -> tuple[int, Workload] | None:
    """The same call with pieces cut along the features of its sum, which are counted: "rows" are then those of the
    weight, or of its transpose, each ``rows`` values wide. None where what is summed is no product, or not gathered.
    """
    flow = _flow(op)
    base, given = flow.partition("-")[0], _Sizes(op, sizes)
    if flow_of(flow).reduce != "all_reduce" or not given.has("out") or given.has("keys"):
        return None
    k, outs, turns = given("features"), given.each("out"), {"mm": Values(2 * rows)}  # the sum is turned at the end
    if base == "all_reduce":
        return sum(outs), Workload(flow, {"h": k, "p": rows, "z": rows}, {"mm": [_turned(k, rows)]}, turns)
    kernels = {"mm": [_turned(n, rows) for n in outs], "wgrad": [_turned(rows, n) for n in outs]}
    return k, Workload(flow, {"h": sum(outs), "p": rows, "z": rows}, kernels, turns)


def _turned(k: int, n: int) -> Step:
    return Step(k, n, turned=True)


def _flow(op: str) -> str:
    name, _, phase = op.partition(" ")
    if name in OPERATORS and phase in ("", "backward"):
        flow = OPERATORS[name][phase == "backward"]
        if not flow:
            raise ValueError(f"{name} moves nothing in its {phase or 'forward'}")
        return flow
    if phase or name.partition("-")[0] not in _PARTS:
        known = ", ".join(dict.fromkeys((*OPERATORS, *_PARTS)))
        raise ValueError(f"unknown operator {op!r}; known, alone or with ' backward': {known}")
    flow_of(name)
    return name


class _Sizes:
    """The sizes of a call, each to be taken once."""

    def __init__(self, op: str, sizes: Mapping[str, int | Sequence[int]]) -> None:
        self._op, self._sizes, self._taken = op, sizes, {"rows"}
        self.tensors = 1

    def has(self, name: str) -> bool:
        return name in self._sizes

    def __call__(self, name: str, default: int | None = None) -> int:
        """A size; of several weights side by side the sum."""
        self._taken.add(name)
        value = self._sizes.get(name, default)
        parts = [value] if isinstance(value, int) else list(value or ())
        if not parts or not all(isinstance(part, int) and part >= 0 for part in parts):
            given = "is missing" if name not in self._sizes else f"must be whole numbers of 0 or more, not {value!r}"
            raise ValueError(f"{self._op}: the size {name!r} {given}; given: {dict(self._sizes)}")
        return sum(parts)

    def each(self, name: str) -> list[int]:
        """A size of each of several weights side by side."""
        self(name)
        value = self._sizes[name]
        return [value] if isinstance(value, int) else list(value)

    def check_all_taken(self) -> None:
        unknown = self._sizes.keys() - self._taken
        if unknown:
            raise ValueError(f"{self._op}: unknown sizes {sorted(unknown)}; it takes {sorted(self._taken)}")


_Parts = tuple[Mapping[str, int], Mapping[str, Sequence[Step | Heads]], Mapping[str, Values]]


def _column(sizes: _Sizes, ranks: int) -> _Parts:
    k = sizes("features")
    if not sizes.has("out"):  # a gather alone: its kernel puts rows where they belong
        return {"x": k, "y": k}, {"mm": ()}, {}
    return {"x": k, "y": sizes("out")}, {"mm": [Step(k, n) for n in sizes.each("out")]}, {}


def _column_backward(sizes: _Sizes, ranks: int) -> _Parts:
    k, outs = sizes("features"), sizes.each("out")
    kernels = {"mm": [Step(n, k) for n in outs], "wgrad": [Step(n, k, True) for n in outs]}
    return {"h": sum(outs), "p": k, "z": k, "g": k}, kernels, {}


def _attends(sizes: _Sizes, backward: bool = False) -> Heads:
    return Heads(sizes("heads") * sizes("head_dim"), sizes("keys"), bool(sizes("causal", 0)), backward)


def _row(sizes: _Sizes, ranks: int) -> _Parts:
    if sizes.has("keys"):
        attends, n = _attends(sizes), sizes("out")
        k = attends.features
        return {"h": k, "p": n, "z": n}, {"mm": [attends, Step(k, n)]}, {}
    k = sizes("features")
    if not sizes.has("out"):  # a sum alone
        return {"h": k, "p": k, "z": k}, {"mm": ()}, {}
    n = sizes("out")
    return {"h": k, "p": n, "z": n}, {"mm": [Step(k, n)]}, {}


def _row_backward(sizes: _Sizes, ranks: int) -> _Parts:
    if sizes.has("keys"):
        attends, n = _attends(sizes, backward=True), sizes("out")
        k = attends.features
        return {"x": n, "y": k}, {"mm": [Step(n, k), attends], "wgrad": [Step(n, k, True)]}, {}
    k, n = sizes("features"), sizes("out")
    return {"x": n, "y": k}, {"mm": [Step(n, k)], "wgrad": [Step(n, k, True)]}, {}


def _mlp(sizes: _Sizes, ranks: int) -> _Parts:
    k, f = sizes("features"), sizes("hidden")
    n, gated = sizes("out", k), bool(sizes("gated", 0))
    kernels = {"up": [Step(k, f)] * (1 + gated), "down": [Step(f, n)]}
    return {"x": k, "h": f, "p": n, "z": n}, kernels, {"up": Values((5 if gated else 2) * f, f)}


def _mlp_backward(sizes: _Sizes, ranks: int) -> _Parts:
    k, f = sizes("features"), sizes("hidden")
    n, weights = sizes("out", k), 1 + bool(sizes("gated", 0))
    kernels = {
        "down": [Step(n, f)],
        "up": [Step(f, k)] * weights,
        "wgrad_down": [Step(n, f, True)],
        "wgrad_up": [Step(f, k, True)] * weights,
    }
    return {"x": n, "h": f, "p": k, "z": k, "g": k}, kernels, {"down": Values((14 if weights > 1 else 5) * f, 2 * f)}


def _by_rows_of_weight(kernel: str) -> Callable[[_Sizes, int], _Parts]:
    """Pieces are rows of a weight or of its gradient; ``rows`` counts them."""

    def parts(sizes: _Sizes, ranks: int) -> _Parts:
        k, tokens = sizes("features"), sizes("tokens")
        step = Step(tokens, k) if kernel == "wgrad" else Step(k, tokens)
        return {"h": k, "p": k, "z": k, "x": k, "y": tokens}, {kernel: [step]}, {}

    return parts


# --- all-to-alls: a block is the rows of one rank times the features of another ---------------------------------------


def _blocks(sizes: _Sizes, ranks: int) -> tuple[dict[str, int], int]:
    """Features of a block by letter, of several weights side by side, and their mean."""
    outs = sizes.each("out")
    sizes.tensors = len(outs)
    widths = {of_tensor("p", number): -(-out // ranks) for number, out in enumerate(outs)}
    return widths, sum(widths.values()) // len(outs)


def _all_to_all(sizes: _Sizes, ranks: int) -> _Parts:
    widths, n = _blocks(sizes, ranks)
    k = sizes("features")
    return {"a": k, **widths}, {"mm": [Step(k, n)]}, {}


def _all_to_all_backward(sizes: _Sizes, ranks: int) -> _Parts:
    widths, n = _blocks(sizes, ranks)
    k = sizes("features")
    return {"z": k, **widths}, {"mm": [Step(n, k)], "wgrad": [Step(n, k, True)]}, {}


def _all_to_all_matmul(sizes: _Sizes, ranks: int) -> _Parts:
    k, n = sizes("features"), sizes("out")
    return {"p": k, "z": n}, {"mm": [Step(k, n)]}, {}


def _all_to_all_matmul_backward(sizes: _Sizes, ranks: int) -> _Parts:
    k, n = sizes("features"), sizes("out")
    return {"a": n, "p": k}, {"mm": [Step(n, k)], "wgrad": [Step(n, k, True)]}, {}


def _attention_all_to_all(sizes: _Sizes, ranks: int) -> _Parts:
    attends = _attends(sizes)
    k = attends.features
    if not sizes.has("out"):  # its last kernel puts features where they belong
        return {"a": k, "p": k, "z": k * ranks}, {"attend": [attends], "mm": ()}, {}
    n = sizes("out")
    return {"a": k, "p": k, "z": n}, {"attend": [attends], "mm": [Step(k, n)]}, {}


def _attention_all_to_all_backward(sizes: _Sizes, ranks: int) -> _Parts:
    attends = _attends(sizes, backward=True)
    k = attends.features
    if not sizes.has("out"):
        return {"a": k, "p": k, "y": k}, {"mm": (), "attend_backward": [attends], "wgrad": ()}, {}
    n = sizes("out")
    kernels = {"mm": [Step(n, k)], "attend_backward": [attends], "wgrad": [Step(n, k, True)]}
    return {"a": n, "p": k, "y": k}, kernels, {}


_PARTS: dict[str, Callable[[_Sizes, int], _Parts]] = {
    "all_gather_matmul": _column,
    "column_backward": _column_backward,
    "column_backward_saved": _column_backward,
    "matmul_reduce_scatter": _row,
    "all_reduce": _row,
    "row_backward": _row_backward,
    "all_reduce_backward": _column_backward,
    "mlp": _mlp,
    "mlp_backward": _mlp_backward,
    "grad_reduce_scatter": _by_rows_of_weight("wgrad"),
    "param_all_gather": _by_rows_of_weight("mm"),
    "all_to_all": _all_to_all,
    "all_to_all_backward": _all_to_all_backward,
    "all_to_all_matmul": _all_to_all_matmul,
    "all_to_all_matmul_backward": _all_to_all_matmul_backward,
    "attention_all_to_all": _attention_all_to_all,
    "attention_all_to_all_backward": _attention_all_to_all_backward,
}
