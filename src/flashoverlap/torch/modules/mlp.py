"""FusedMLP: a whole MLP in one schedule, in place of its linears one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..functional import linear_all_reduce, mlp
from .lazy_rows import own_rows
from .linear import ColumnParallel, RowParallel, columns, is_transposed
from .parallel import Parallel, Parallelized, become
from .style import Style, submodules

_CLOSE = 0.05  # of half precision; another formula is further away
_Function = str | Callable[[torch.Tensor], torch.Tensor]
# activations by their classes' names: torch's and those of transformers
_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
}


class Fused(Parallelized):
    """An MLP that runs as one schedule under sequence parallelism."""

    _names: dict[str, str]
    _activation: _Function
    _dropout: str | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))``, on own rows (or on all rows)."""
        parallel = self._parallel
        linears: dict[str, Any] = {role: self.get_submodule(name) for role, name in self._names.items()}
        up, down, gate = linears["up"], linears["down"], linears.get("gate")
        if parallel.sequence_parallel:
            out = mlp(
                own_rows(x),
                up.shard("weight"),
                down.shard(),
                gate=None if gate is None else gate.shard("weight"),
                activation=self._activation,
                up_bias=up.shard("bias"),
                gate_bias=None if gate is None else gate.shard("bias"),
                down_bias=down.replicated_bias(),
                **parallel.call,
            )
        else:
            raised = columns(x, [up] if gate is None else [gate, up])
            active = _function(self._activation)(raised[0])
            active = active if gate is None else active * raised[1]
            out = linear_all_reduce(active, down.shard(), down.replicated_bias(), **parallel.call)
        if self._dropout is None:
            return out
        return self.get_submodule(self._dropout)(out)


class FusedMLP(Style):
    """A module ``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))``: a piece goes through all of it at once.

    Args:
        up: name of the first linear below the module.
        down: of the last.
        gate: of the gate, or None.
        activation: "silu", "gelu", "gelu_tanh", "relu" or a callable that works row by row; None takes the module's
            ``act_fn``, ``act`` or ``activation``.
        dropout: name of a dropout that follows, or None.

    Without sequence parallelism its linears run one by one.
    """

    def __init__(
        self,
        up: str = "up_proj",
        down: str = "down_proj",
        gate: str | None = "gate_proj",
        *,
        activation: _Function | None = None,
        dropout: str | None = None,
    ) -> None:
        self.up, self.down, self.gate, self.activation, self.dropout = up, down, gate, activation, dropout

    def placements(self, module: nn.Module, name: str, parallel: Parallel) -> dict[str, Any]:
        self._activation(module)
        found: dict[str, Any] = {}
        for child, linear in zip(self._children, submodules(module, self._children), strict=True):
            style = RowParallel() if child == self.down else ColumnParallel()
            found |= {f"{child}.{each}": p for each, p in style.placements(linear, child, parallel).items()}
        submodules(module, [self.dropout])
        self._check_children(module)
        self._check_forward(module)
        return found

    def _check_children(self, module: nn.Module) -> None:
        """Refuses what would be left out: children that are neither named nor the activation."""
        known = {*self._children, self.dropout}
        for name, child in module.named_children():
            drops = any(isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0 for each in child.modules())
            if name not in known and (drops or any(True for _ in child.parameters())):
                raise ValueError(f"{name} ({type(child).__name__}) would be left out; FusedMLP(...) does not name it")

    def _check_forward(self, module: nn.Module) -> None:
        """Tries the module on two rows: it must be the MLP that takes its place."""
        up, down, gate = (None if n is None else module.get_submodule(n) for n in (self.up, self.down, self.gate))
        assert up is not None
        weight = next(up.parameters())
        if weight.is_meta:
            return
        modes = {each: each.training for each in module.modules()}
        features = weight.shape[0 if is_transposed(up) else 1]
        random = torch.Generator(weight.device).manual_seed(1)
        x = torch.randn(1, 2, features, dtype=weight.dtype, device=weight.device, generator=random)
        try:
            with torch.no_grad():
                found = module.eval()(x)
                active: Any = _function(self._activation(module))((up if gate is None else gate)(x))
                wanted = down(active if gate is None else active * up(x))  # pyright: ignore[reportOptionalCall]
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"it cannot be tried on rows of {features} features: {error}") from None
        finally:
            for each, training in modes.items():
                each.training = training
        allowed = _CLOSE * max(float(wanted.float().abs().max()), 1e-6)
        if found.shape != wanted.shape or not float((found - wanted).float().abs().max()) <= allowed:
            inner = f"{self.up}(x)" if gate is None else f"{self.gate}(x)"
            formula = f"{self.down}(act({inner}){'' if gate is None else f' * {self.up}(x)'})"
            raise ValueError(f"it does not compute {formula}; give its linears styles of their own")

    @property
    def _children(self) -> list[str]:
        return [name for name in (self.up, self.gate, self.down) if name is not None]

    def apply(self, module: nn.Module, parallel: Parallel) -> None:
        for child, linear in zip(self._children, submodules(module, self._children), strict=True):
            (RowParallel() if child == self.down else ColumnParallel()).apply(linear, parallel)
        names = {role: name for role in ("up", "down", "gate") if (name := getattr(self, role)) is not None}
        become(module, Fused, parallel, _names=names, _activation=self._activation(module), _dropout=self.dropout)

    def _activation(self, module: nn.Module) -> _Function:
        if self.activation is not None:
            return self.activation
        found: Any = next((getattr(module, n) for n in ("act_fn", "act", "activation") if hasattr(module, n)), None)
        if found is None:
            raise ValueError("the MLP has no act_fn, act or activation; give FusedMLP(activation=...)")
        if isinstance(found, nn.GELU):
            return "gelu" if found.approximate == "none" else "gelu_tanh"
        if found in (torch.nn.functional.silu, torch.nn.functional.gelu):
            return "silu" if found is torch.nn.functional.silu else "gelu"
        known = _ACTIVATIONS.get(type(found).__name__)
        return found if known is None else known


def _function(activation: _Function) -> Callable[[torch.Tensor], torch.Tensor]:
    if not isinstance(activation, str):
        return activation
    if activation == "gelu_tanh":
        return nn.GELU(approximate="tanh")
    return getattr(torch.nn.functional, activation)
