"""mlp: a whole MLP under tensor and sequence parallelism in one schedule.

M rows in all, K features, F hidden features, n ranks, rank r
x_shard   [M_r, K]
up, gate  [F_r, K]
down      [K, F_r]   (any number of output features)
z_shard   [M_r, K]

forward   z_r = sum_q down_q(act_q(up_q(x_r)))   a piece goes through all its matmuls before the next: own up at
                                                 the start, the pieces of others as they arrive, own down at the end
backward  dz is gathered, each piece goes through both dgrads, dx is scattered; x is gathered anew meanwhile; both
          wgrads are one matmul each over all rows, before the own piece's last dgrad

Where a plan says that it is faster, the layers run one after the other instead, each with its own schedule: up as an
all-gather before a matmul, down as a matmul before a reduce-scatter, and in backward down's part, then up's.

memory    x_shard and what enters the activation (and the gated product) are kept for backward: M / n rows of K and
          M rows of F / n each; the activation is computed again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...overlap import Overlap
from ...patterns import split_sizes
from ...workload import LAYERS
from ..call import Call, eager
from ..check import autocast, check_dim, check_linear, check_overlap, check_tensors, grads, shape
from ..execute import Kernel
from ..layout import Layout, around, flatten, layout
from ..pieces import Gathered, Scattered
from ..staging import Lease
from ..transport import refusing, transport_of
from .activation import Activation
from .derivative import differentiable_once
from .kernels import linear_into, matmul, matmul_into

_OP = "mlp"


@eager
def mlp(
    x_shard: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    activation: str | Callable[[torch.Tensor], torch.Tensor] = "silu",
    up_bias: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    group: Any,
    dim: int = -2,
    overlap: Overlap = Overlap(),
) -> torch.Tensor:
    """``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))`` where a gate is given, on own rows in and out.

    Args:
        x_shard: own rows ``[..., M_r, K]``.
        up: ``[F_r, K]``.
        down: ``[N, F_r]``.
        gate: ``[F_r, K]`` or None.
        activation: "silu", "gelu", "gelu_tanh", "relu" or a differentiable callable that works row by row.
        up_bias: ``[F_r]``.
        gate_bias: ``[F_r]``.
        down_bias: ``[N]``, the full bias, equal on all ranks; added once.
        group: process group or one-dimensional DeviceMesh.
        dim: dimension of ``x_shard`` that is sharded, not the last.
        overlap: how to overlap.

    Returns:
        The own rows ``[..., M_r, N]``.

    Raises:
        ValueError, TypeError: on every rank before anything moves, for arguments that do not fit together or differ
            between ranks.
        PeerError: a peer refused the call, died or stalled.
    """
    transport = transport_of(group, _OP, x_shard)
    with refusing(transport):
        check_overlap(_OP, overlap)
        function = Activation(activation)
        cast: list[Any] = autocast(x_shard, up, gate, down, up_bias, gate_bias, down_bias)
        check_tensors(_OP, cast[0], [cast[1], cast[3], *([] if gate is None else [cast[2]])], cast[4:])
        _check_shapes(*cast)
        function.try_out(up.shape[0], cast[0])
        row_dim = check_dim(_OP, cast[0], dim)
    call = Call(_OP, transport, overlap, cast[0])
    outer, rows, inner = around(cast[0].shape, row_dim)
    flags = grads(x_shard, up, gate, down, up_bias, gate_bias, down_bias)
    shared = (
        f"outer={outer} inner={inner} features={cast[0].shape[-1]} out={cast[3].shape[0]} "
        f"activation={function.name} has={[t is not None for t in cast]} {flags}"
    )
    shown = f"x {shape(cast[0])} dim {row_dim}, up {shape(cast[1])}, gate {shape(cast[2])}, down {shape(cast[3])}, "
    owned = call.agree_rows(shared, f"{shown}{function.name}, {flags}", rows, up.shape[0])
    return _Mlp.apply(call, owned, row_dim, function, *cast)  # pyright: ignore[reportReturnType]


def _check_shapes(x: Any, up: Any, gate: Any, down: Any, up_bias: Any, gate_bias: Any, down_bias: Any) -> None:
    check_linear(_OP, x, up, up_bias)
    if gate is not None:
        check_linear(_OP, x, gate, gate_bias)
        if gate.shape != up.shape:
            raise ValueError(f"{_OP}: gate {tuple(gate.shape)} and up {tuple(up.shape)} must be of one shape")
    elif gate_bias is not None:
        raise ValueError(f"{_OP}: gate_bias {tuple(gate_bias.shape)} is given without a gate")
    if down.dim() != 2 or down.shape[1] != up.shape[0]:
        raise ValueError(f"{_OP}: down {tuple(down.shape)} must be [out, {up.shape[0]}] to follow up {tuple(up.shape)}")
    if down_bias is not None and tuple(down_bias.shape) != (down.shape[0],):
        raise ValueError(f"{_OP}: down_bias {tuple(down_bias.shape)} does not fit down {tuple(down.shape)}")


class _Run:
    """What one run of the whole takes: one schedule, or one for each layer.

    ``first`` is the layout of what is gathered at the start, ``last`` that of what is scattered in the end, and of what
    the last layer gathers.
    """

    def __init__(
        self, call: Call, flow: str, shape: tuple[int, tuple[int, ...], int], sizes: Mapping[str, int]
    ) -> None:
        self._call, self._flow = call, flow
        self.choice, self.first = call.choose(flow, *shape, sizes)
        self.last = self.first
        if self.choice.layers:
            self.first, self.last = (layout(*shape, each.splits) for each in self.choice.layers)

    def scattered(self, out: torch.Tensor, lease: Lease, bias: torch.Tensor | None = None) -> Scattered:
        """The partial sums, whose own rows end in ``out``."""
        return self._call.scattered(self.last, (self.choice, *self.choice.layers)[-1], out, lease, bias)

    def __call__(
        self,
        widths: Mapping[str, int],
        buffers: Callable[[str], torch.Tensor],
        kernels: Mapping[str, Kernel],
        phase: str = "",
    ) -> None:
        """Runs ``kernels``, as :meth:`~flashoverlap.torch.call.Call.run` does; layers have kernels of other names."""
        rows = self.first.rows
        if not self.choice.layers:
            self._call.run(self._flow, self.choice, rows, widths, buffers, kernels, phase)
            return
        for choice, (flow, names) in zip(self.choice.layers, LAYERS[self._flow], strict=True):
            own = {name: kernels[whole] for name, whole in names.items()}
            self._call.run(flow, choice, rows, widths, buffers, {"": kernels[""], **own}, phase)


class _Room:
    """Room for hidden rows: of all pieces, or of the own piece and of one split of the others at a time.

    [Note: one split at a time] A piece goes through all its matmuls before the next, so that its hidden rows are still
    in the cache when they are read, and need no room of their own. Only the own piece waits from start to end.
    """

    def __init__(self, buffer: torch.Tensor, own: range | None) -> None:
        self.buffer, self._own = buffer, own

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start:stop`` in piece order."""
        if self._own is None:
            return self.buffer[start:stop]
        first = start - self._own.start if start in self._own else len(self._own)
        return self.buffer[first : first + stop - start]


class _Hidden:
    """The hidden rows ``[M, F_r]`` of the pieces: what enters the activation, and what leaves it."""

    def __init__(
        self, call: Call, rows: Layout, tensors: Any, function: Activation, lease: Lease, keep: bool, whole: bool
    ) -> None:
        _, self.up, self.gate, _, self.up_bias, self.gate_bias, _ = tensors
        self.function = function
        features = self.up.shape[0]
        own = range(rows.starts[call.rank], rows.starts[call.rank + 1])
        split = split_sizes(max(rows.rows), rows.splits)[0]

        def room(kept: bool) -> _Room:
            if kept:
                return _Room(tensors[0].new_empty(rows.total, features), None)
            count = rows.total if whole else len(own) + split
            return _Room(lease.tensor(count, features, call.dtype), None if whole else own)

        self.raised = room(keep)
        self.gated = room(keep) if self.gate is not None else None
        self.active = room(False) if keep or self.gate is not None else self.raised

    def enter(self, x: torch.Tensor, start: int, stop: int) -> None:
        """Takes rows ``start:stop`` of x through up (and gate) and the activation."""
        raised, gated = self.raised.rows(start, stop), None
        linear_into(raised, x, self.up, self.up_bias)
        if self.gated is not None:
            gated = self.gated.rows(start, stop)
            linear_into(gated, x, self.gate, self.gate_bias)
        _activate(self.function, self.active.rows(start, stop), raised, gated)


def _activate(function: Activation, out: torch.Tensor, raised: torch.Tensor, gated: torch.Tensor | None) -> None:
    """What leaves the activation: ``act(raised)``, or ``act(gated) * raised``."""
    function.into(out, raised if gated is None else gated)
    if gated is not None:
        out *= raised


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, owned: tuple[int, ...], dim: int, function: Activation, *tensors: Any
    ) -> torch.Tensor:
        x, up, gate, down, _, _, down_bias = tensors
        outer, _, inner = around(x.shape, dim)
        run = _Run(call, "mlp", (outer, owned, inner), _sizes(call, x, gate, down))
        rows = run.first
        features, columns = x.shape[-1], down.shape[0]
        z = x.new_empty(*x.shape[:-1], columns)
        keep = call.differentiable and any(ctx.needs_input_grad)
        with call.leased() as lease:
            own = flatten(x)
            gathered = Gathered(rows, call.rank, own, lease.tensor(rows.total, features, x.dtype))
            whole = run.choice.pattern not in ("direct", "ring")
            hidden = _Hidden(call, rows, tensors, function, lease, keep, whole)
            scattered = run.scattered(flatten(z), lease, down_bias)

            def raise_pieces(op: Any) -> None:
                for part, start, stop in gathered.runs(op.reads):
                    hidden.enter(part, start, stop)

            def product(names: tuple[str, ...], target: torch.Tensor, first: int, beta: float) -> None:
                for start, stop in run.last.runs(names):
                    matmul_into(target[start - first : stop - first], hidden.active.rows(start, stop), down.t(), beta)

            kernels = {"up": raise_pieces, "down": lambda op: scattered.multiply(op, product), "": scattered.add}
            widths = {"x": features * x.itemsize, "h": up.shape[0] * x.itemsize, "p": columns * x.itemsize}
            run(widths, _by_letter(gathered, scattered, "x"), kernels)
            _end(call, function)
            scattered.finish()
            kept = (hidden.raised.buffer, hidden.gated and hidden.gated.buffer) if keep else (None, None)
        ctx.call, ctx.owned, ctx.dim, ctx.function = call, owned, dim, function
        ctx.save_for_backward(*tensors, *kept)
        return z

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        needs: dict[str, bool] = dict(zip(_NAMES, ctx.needs_input_grad[4:], strict=True))
        run = _Backward(ctx, grad_outputs[0], needs)
        return None, None, None, None, *(run.grads[name] if needs[name] else None for name in _NAMES)


_NAMES = ("x", "up", "gate", "down", "up_bias", "gate_bias", "down_bias")


class _Backward:
    """The backward schedule of one call: letters x (dz), h (gradients of the hidden rows), g (x) and p (dx)."""

    def __init__(self, ctx: Any, grad: torch.Tensor, needs: dict[str, bool]) -> None:
        self.needs = needs
        self._made = False  # whether the activation has been made again
        self.grads: dict[str, Any] = dict.fromkeys(_NAMES)
        call: Call = ctx.call
        x, self.up, self.gate, self.down, *_, raised, gated = ctx.saved_tensors
        outer, _, inner = around(x.shape, ctx.dim)
        biased = needs["up_bias"] or needs["gate_bias"]
        enters = needs["up"] or needs["gate"] or (biased and not needs["x"])  # dx makes what biases need, without x
        leaves = needs["down"] or needs["down_bias"]
        flow = "mlp_backward" + ("" if enters else "-w") + ("" if leaves else "-v") + ("" if needs["x"] else "-z")
        call.agree("backward", f"{flow} owned={ctx.owned}", f"{flow}, rows {list(ctx.owned)}")
        run = _Run(call, flow, (outer, ctx.owned, inner), _sizes(call, x, self.gate, self.down))
        rows, self.rows = run.first, run.last
        self.raised, self.gated, self.function = raised, gated, ctx.function
        columns, features, hidden = self.down.shape[0], x.shape[-1], self.up.shape[0]
        dx = x.new_empty(rows.rows[call.rank], features)
        with call.leased() as lease:
            self.active = lease.tensor(rows.total, hidden, x.dtype)
            self.draised = lease.tensor(rows.total, hidden, x.dtype)
            self.dgated = lease.tensor(rows.total, hidden, x.dtype) if gated is not None else None
            own = flatten(grad)
            self.dz = Gathered(rows, call.rank, own, lease.tensor(rows.total, columns, x.dtype))
            own = flatten(x)
            self.x = Gathered(run.last, call.rank, own, lease.tensor(rows.total, features, x.dtype))
            self.dx = run.scattered(dx, lease)
            kernels = {
                "down": self._down,
                "up": lambda op: self.dx.multiply(op, self._up),
                "": self.dx.add,
                "wgrad_down": self._wgrad_down,
                "wgrad_up": self._wgrad_up,
            }
            size = x.itemsize
            widths = {"x": columns * size, "g": features * size, "p": features * size, "h": hidden * size}
            run(widths, self._tensor, kernels, "backward")
            _end(call, ctx.function)
            self._bias_grads()
            self.dx.finish()
        self.grads["x"] = dx.view(x.shape)

    def _tensor(self, name: str) -> torch.Tensor:
        return (self.dz if name[0] == "x" else self.x if name[0] == "g" else self.dx).tensor(name)

    def _down(self, op: Any) -> None:
        """From dz to the gradients of what entered the activation; the activation itself is made again for wgrad."""
        for part, start, stop in self.dz.runs(op.reads):
            grad, raised, active = self.draised[start:stop], self.raised[start:stop], self.active[start:stop]
            matmul_into(grad, part, self.down, 0.0)
            if self.gated is None or self.dgated is None:
                if self.needs["down"]:
                    self.function.into(active, raised)
                self.function.backward_into(grad, grad, raised)
            else:
                gated, dgated = self.gated[start:stop], self.dgated[start:stop]
                self.function.into(active, gated)
                torch.mul(grad, raised, out=dgated)
                self.function.backward_into(dgated, dgated, gated)
                grad *= active
                active *= raised
        self._made = True

    def _up(self, names: tuple[str, ...], target: torch.Tensor, first: int, beta: float) -> None:
        for start, stop in self.rows.runs(names):
            rows = target[start - first : stop - first]
            matmul_into(rows, self.draised[start:stop], self.up, beta)
            if self.dgated is not None:
                matmul_into(rows, self.dgated[start:stop], self.gate, 1.0)

    def _wgrad_down(self, op: Any) -> None:
        dz = self.dz.all()
        if self.needs["down"]:
            if not self._made:
                _activate(self.function, self.active, self.raised, self.gated)
            self.grads["down"] = matmul(dz.t(), self.active)
        if self.needs["down_bias"]:
            self.grads["down_bias"] = dz.sum(0)

    def _wgrad_up(self, op: Any) -> None:
        x = self.x.all()
        for weight, grad in (("up", self.draised), ("gate", self.dgated)):
            if grad is not None and self.needs[weight]:
                self.grads[weight] = matmul(grad.t(), x)
        self._bias_grads()

    def _bias_grads(self) -> None:
        for bias, grad in (("up_bias", self.draised), ("gate_bias", self.dgated)):
            if grad is not None and self.needs[bias] and self.grads[bias] is None:
                self.grads[bias] = grad.sum(0)


def _sizes(call: Call, x: torch.Tensor, gate: torch.Tensor | None, down: torch.Tensor) -> dict[str, int]:
    return {"features": x.shape[-1], "hidden": call.shard, "out": down.shape[0], "gated": int(gate is not None)}


def _end(call: Call, function: Activation) -> None:
    """The caller's own activation may have failed on one rank: then no rank goes on before all are through."""
    if function.own:
        call.agree("end", "", "")


def _by_letter(gathered: Gathered, scattered: Scattered, letter: str) -> Callable[[str], torch.Tensor]:
    return lambda name: gathered.tensor(name) if name[0] == letter else scattered.tensor(name)
