"""One model's data parallelism: what happens around its forward, its backward and the optimizer's step."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from .account import Account
from .channels import Channels
from .gradients import Gradients, in_backward
from .shards import parameter_of
from .stream import Stream
from .unit import Member, Unit
from .values import Values


class Engine:
    """Ties the halves together.

    Args:
        units: all units of the model.
        channels: of the group.
        gradients: the backward half.
        values: the forward half; None where parameters are whole on every rank.
        stream: of the weights that are dropped after use; None where there are none.
        account: what the report is told.

    Attributes:
        sequence: the mesh of ranks that share sequences, where this is all that the engine is for.
        released: whether another engine has taken its place.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        channels: Channels,
        gradients: Gradients,
        values: Values | None,
        stream: Stream | None,
        account: Account,
    ) -> None:
        self.account = account
        self.units, self.channels, self.gradients, self.values = list(units), channels, gradients, values
        self.stream = gradients.stream = stream
        self.sequence: DeviceMesh | None = None
        self.released = False
        self._depth = 0
        self._hooked: set[Member] = set()
        self._unit_of = {member: unit for unit in units for member in unit.members}
        if values is not None:
            gradients.others.append(values.order)
        self._attach()

    def _attach(self) -> None:
        """Hooks: on what autograd accumulates, and around optimizers' steps."""
        self._hook_leaves()
        if any(unit.sharded for unit in self.units):
            before = register_optimizer_step_pre_hook(partial(_around_step, weakref.ref(self), False))
            after = register_optimizer_step_post_hook(partial(_around_step, weakref.ref(self), True))
            weakref.finalize(self, _remove, after, before)

    def _hook_leaves(self) -> None:
        """Those that require a gradient by now."""
        for member, unit in self._unit_of.items():
            if member.parameter is not member.leaf and member.leaf.requires_grad != member.parameter.requires_grad:
                member.leaf.requires_grad_(member.parameter.requires_grad)
            if member.leaf.requires_grad and member not in self._hooked:
                self._hooked.add(member)
                hook = partial(_accumulated, weakref.ref(self), unit, member)
                member.leaf.register_post_accumulate_grad_hook(hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        made = Engine.__new__(Engine)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        made._hooked = set()  # hooks are not copied
        made._attach()
        return made

    def copy_shards(self, memo: dict[int, Any]) -> None:
        """Puts copies of the shards where a deep copy will find them: torch's own fails for views within a storage."""
        for member in self._unit_of:
            held: Any = member.parameter
            if held is member.leaf or id(held) in memo:
                continue
            if not member.value.untyped_storage().nbytes() and member.value.nbytes:  # dropped: there is nothing to copy
                leaf = memo[id(member.leaf)] = nn.Parameter(torch.empty_like(member.value), member.leaf.requires_grad)
                leaf.untyped_storage().resize_(0)
            made = memo[id(held)] = parameter_of(held._local_tensor.clone(), held._spec, held.requires_grad)
            if held.grad is not None:
                made.grad = DTensor(held.grad._local_tensor.clone(), held.grad._spec, requires_grad=False)  # pyright: ignore[reportCallIssue]

    # --- forward ------------------------------------------------------------------------------------------------------

    @property
    def is_computing(self) -> bool:
        """Whether forward or backward is under way."""
        return self._depth > 0 or self.gradients.is_running

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Within, modules show whole values."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextmanager
    def forward(self, training: bool) -> Iterator[None]:
        """Around a forward of the model itself."""
        if self.gradients.is_running and in_backward():  # computed again for backward, of which it is a part
            with self.computing():
                yield
            return
        with self.account.timed() if training and torch.is_grad_enabled() else nullcontext(), self._outermost(training):
            yield

    @contextmanager
    def _outermost(self, training: bool) -> Iterator[None]:
        self.gradients.recover()
        self._hook_leaves()
        if self.values is not None:
            self.values.refresh()
        differentiable = torch.is_grad_enabled()
        self.gradients.forwards += differentiable
        if self.stream is None:
            with self.computing():
                yield
            self._settle()
            return
        self.stream.begin(("forward", differentiable, training))
        try:
            with self.computing():
                yield
            self.stream.end()
            self._settle()
        except BaseException as error:  # what is on its way will not be taken, and the peers wait for the rest
            self.gradients.abandon(error)
            raise

    def watch(self, outputs: Any) -> Any:
        """Lets the backward pass be noticed where it comes in; gives back the outputs."""
        if torch.is_grad_enabled():
            arm = partial(_arm, weakref.ref(self))
            for output in tree_leaves(outputs):
                if isinstance(output, torch.Tensor) and output.requires_grad:
                    output.register_hook(arm)
        return outputs

    def step(self, optimizer: torch.optim.Optimizer, after: bool) -> None:
        """Around a step of any optimizer: nothing of its parameters may be in flight, and then all of it is to be."""
        ours = {member.parameter for member in self._unit_of}
        if not any(parameter in ours for group in optimizer.param_groups for parameter in group["params"]):
            return
        if not after:
            self._settle()
            return
        with self.account.timed():
            for source in (self.values, self.stream):
                if source is not None:
                    source.stepped()

    def _settle(self) -> None:
        """Returns once no shard is read any more: whoever loads a state dict, say, writes to them unannounced."""
        for source in (self.values, self.stream):
            if source is not None:
                source.settle()

    def value(self, member: Member) -> torch.Tensor:
        """The whole value of a parameter, once it is there."""
        unit = self._unit_of[member]
        source = self.stream if self.stream is not None and self.stream.has(unit) else self.values
        assert source is not None
        source.need(unit)
        source.keep(unit)
        return member.leaf

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, backward passes exchange nothing."""
        before, self.gradients.sync = self.gradients.sync, False
        try:
            yield
        finally:
            self.gradients.sync = before


def _accumulated(engine: Any, unit: Unit, member: Member, _: torch.Tensor) -> None:
    found = engine()
    if found is not None and not found.released:
        found.gradients.accumulated(unit, member)


def _arm(engine: Any, _: torch.Tensor) -> None:
    found = engine()
    if found is not None:
        found.gradients.arm()


def _around_step(engine: Any, after: bool, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    found = engine()
    if found is not None:
        found.step(optimizer, after)


def _remove(*handles: Any) -> None:
    for handle in handles:
        handle.remove()
