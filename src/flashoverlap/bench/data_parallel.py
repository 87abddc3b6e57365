"""Data parallelism: every rank has all of a model's parameters or a shard of them, and rows of its own."""

from __future__ import annotations

import copy
import time
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import flashoverlap.torch as fo

from ..overlap import Overlap
from ..torch.data_parallel import apply
from ..torch.transport import Silent
from .case import Case
from .contestant import Contestant
from .matmul_clock import MatmulClock, Tails
from .shapes import StackShape
from .values import TOLERANCES


class DataParallel(Case):
    """Steps of SGD in a row, each of forward, backward and optimizer.

    What is compared is each step's loss of own rows, and by how much the steps have changed each parameter, with one
    process that takes them on the rows of all ranks. The tolerance is for each unit of the largest change in a
    parameter, and at least what a rounding of its largest value at each step amounts to.

    Attributes:
        model: with all parameters; whoever trains it takes a copy.
        lr: learning rate, at which the changes are large beside the roundings of what is changed.
    """

    lr: float
    model: nn.Module

    def __init__(self, shape: StackShape, dtype: torch.dtype, rank: int, world_size: int) -> None:
        self.shape, self.dtype, self.rank, self.world_size = shape, dtype, rank, world_size
        self.passes = shape.steps
        self.grad = torch.ones(())  # of the loss

    @abstractmethod
    def loss(self, model: nn.Module, rank: int) -> torch.Tensor:
        """The mean loss over the rows of a rank."""

    @abstractmethod
    def in_float64(self) -> nn.Module:
        """A copy of the model in float64."""

    def contestant(self, group: Any, transport: Any, overlap: Overlap, variant: str = "") -> Contestant:
        """A copy of the model under ``fo.data_parallel``; where nothing is moved, the plain model, or in the variant
        "parallel" the same as where something is."""
        model = copy.deepcopy(self.model)
        if isinstance(transport, Silent) and not variant:
            return Steps(self, model)
        mesh = DeviceMesh.from_group(group, "cpu")
        if isinstance(transport, Silent):
            return OurSteps(self, apply(model, mesh, transport, shard=self.shape.shard, overlap=overlap))
        return OurSteps(self, fo.data_parallel(model, mesh, shard=self.shape.shard, overlap=overlap))

    def _rounding(self) -> dict[str, float]:
        """By parameter, in units of the tolerance, what a rounding of its largest value at each step amounts to."""
        each = self.passes * torch.finfo(self.dtype).eps / TOLERANCES[self.dtype]
        return {name: each * float(parameter.detach().abs().max()) for name, parameter in self.model.named_parameters()}

    def reference(self, train: bool) -> dict[str, torch.Tensor]:
        """Own losses, and the changes of whole parameters."""
        self.units = {"out": 0.0, **self._rounding()}
        model = self.in_float64()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr)
        own = []
        for _ in range(self.passes):
            for rank in range(self.world_size):
                loss = self.loss(model, rank)
                (loss / self.world_size).backward()
                if rank == self.rank:
                    own.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        after = {name: parameter.detach() for name, parameter in model.named_parameters()}
        return {"out": torch.stack(own), **{name: after[name] - before[name] for name in after}}


class Steps(Contestant):
    """A model and its optimizer.

    Args:
        case: whose loss is minimised.
        model: whose parameters are named as in the case.
        run: what is called in its place, where something is wrapped around it.
        detail: what it is.
    """

    def __init__(self, case: DataParallel, model: nn.Module, run: nn.Module | None = None, detail: str = "") -> None:
        self._case, self._run, self.detail = case, run or model, detail
        self._model: Any = model
        self.leaves = dict(model.named_parameters())
        self._initial = {name: leaf.detach().clone() for name, leaf in self.leaves.items()}
        self._optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)

    def prepare(self) -> None:
        """A step: so that the first that is timed begins with what one leaves to the next, as the last ends with it."""
        self._step()

    def run(self, grad: torch.Tensor | None) -> torch.Tensor:
        """The steps; returns the loss of each."""
        return torch.stack([self._step() for _ in range(self._case.passes)])

    def forward(self) -> torch.Tensor:
        """The loss of own rows."""
        return self._case.loss(self._run, self._case.rank)

    def _step(self) -> torch.Tensor:
        loss = self.forward()
        loss.backward()
        self._finish()
        return loss.detach()

    def _finish(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def results(self, out: torch.Tensor) -> dict[str, torch.Tensor]:
        """The losses and the changes."""
        return {"out": out, **{name: self._change(name, leaf) for name, leaf in self.leaves.items()}}

    def _change(self, name: str, leaf: torch.Tensor) -> torch.Tensor:
        change = _local(leaf).double() - _local(self._initial[name]).double()
        if not isinstance(leaf, DTensor):
            return change
        mesh, placements = leaf.device_mesh, leaf.placements
        return DTensor.from_local(change, mesh, placements, run_check=False, shape=leaf.shape, stride=leaf.stride())

    def clear(self) -> None:
        """Forgets gradients, and takes the parameters back to where they began."""
        self._optimizer.zero_grad()
        with torch.no_grad():
            for name, leaf in self.leaves.items():
                leaf.copy_(self._initial[name])

    def tails(self) -> Tails:
        """Those of a step that follows another."""
        self._step()
        with MatmulClock() as clock:
            begin_s = time.perf_counter()
            loss = self.forward()
            clock.turn()
            loss.backward()
            end_s = time.perf_counter()
        self._finish()
        return clock.tails(begin_s, end_s)

    def held(self) -> Iterable[torch.Tensor]:
        """The parameters, or own shards of them."""
        return map(_local, self.leaves.values())


class OurSteps(Steps):
    """Under the library, where a step leaves the gather of its new parameters to the next forward."""

    def clear(self) -> None:
        """The same, after a forward that ends what was left to it, and would be in the way of whoever is next."""
        with torch.no_grad():
            self.forward()
        super().clear()

    def transports(self, group: Any) -> list[Any]:
        """Those of the model's own."""
        channels = self._model._engine.channels
        return [*dict.fromkeys((channels.reduce, channels.gather, channels.stream))]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The own shard of a DTensor, or the tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
