"""The forward half: the pieces of sharded parameters, gathered under the matmuls that use them.

[Note: shards are views] Whole values stay in memory, and what the optimizer steps on is a view of the own rows. So only
the rows of others move, and an optimizer's step is seen by the version of the shard.

[Note: when values move] After a step, or whatever else has changed a shard, all units are posted at once, in the
order of their first use: from the optimizer's hook, or at the latest when forward begins. Parameters change on all
ranks or on none, as an optimizer's step does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import naming
from ..staging import Lease
from ..transport import agree
from .account import Account
from .channels import Channels
from .flight import Gathering, Use
from .order import Order, digest
from .unit import Unit, local


class _Coming:
    """The values of one unit on their way."""

    def __init__(self, unit: Unit, transport: Any, pattern: str) -> None:
        self.unit, self._rank = unit, transport.rank
        self._lease = Lease(transport.staging, unit.device)
        if unit.single:
            member = unit.members[0]
            whole = member.value.view(-1, member.width or 1) if member.shape else member.value.view(1, 1)
            self._flat = None
            blocks = [whole[start:stop] for start, stop in zip(member.starts, member.starts[1:], strict=False)]
        else:
            self._flat = self._lease.tensor(1, unit.total, unit.dtype)[0]
            unit.pack(self._flat, self._rank, [member.value for member in unit.members], 1.0)
            blocks = [self._flat[start:stop] for start, stop in zip(unit.starts, unit.starts[1:], strict=False)]
        self.gathering = Gathering(transport, pattern, blocks, len(unit.parts))

    def receive(self, use: Use | None = None) -> None:
        """Waits for the values, piece by piece."""
        self.gathering.receive(use)
        if self._flat is not None:
            values = [member.value for member in self.unit.members]
            for rank in range(len(self.unit.sizes)):
                if rank != self._rank:
                    self.unit.unpack(self._flat, rank, values)

    def close(self) -> Any:
        """Waits until the own piece has left as well."""
        outcome = self.gathering.close()
        self._lease.close()
        return outcome


class Values:
    """The whole values of one model's sharded units.

    Args:
        name: of the model, for messages.
        units: those that are sharded, in the order of registration.
        channels: of the group.
        account: what the report is told.
    """

    def __init__(self, name: str, units: Sequence[Unit], channels: Channels, account: Account) -> None:
        self._name, self._units, self._channels, self._account = name, units, channels, account
        self._by_number = {unit.index: unit for unit in units}
        self.order = Order(self._by_number)
        self._coming: dict[int, _Coming] = {}
        self._leaving: list[_Coming] = []
        self._rounds = 0
        self._stepped = False  # an optimizer has stepped, whatever versions say
        self._versions = self._now()

    def _now(self) -> list[tuple[int, int, int]]:
        """What changes with every shard that is written to; an optimizer may count on the DTensor or below it."""
        shards = [(member.shard(), member.parameter) for unit in self._units for member in unit.members]
        return [(shard.data_ptr(), shard._version, parameter._version) for shard, parameter in shards]

    def refresh(self) -> None:
        """Posts all units if a shard has changed since they were last gathered ([Note: when values move])."""
        if self._now() == self._versions and not self._stepped:
            return
        self.settle()
        with naming(f"data_parallel {self._name}"):
            self._post()

    def stepped(self) -> None:
        """An optimizer has changed the shards."""
        self._stepped = True
        self.refresh()

    def _post(self) -> None:
        transport = self._channels.gather
        self._rounds += 1
        order = digest([str(self.order.numbers)])
        shown = f"data_parallel of {self._name}, values for the {self._rounds}th time, order {order}"
        agree(transport, shown, shown)
        self._versions, self._stepped = self._now(), False
        for number in self.order.numbers:
            unit = self._by_number[number]
            for member in unit.members:
                member.own_up(transport.rank)
                # a graph that has kept the old values must not go backward with new ones
                torch.autograd.graph.increment_version(local(member.leaf))
            coming = self._coming[number] = _Coming(unit, transport, self._account.pattern)
            if not self._account.overlaps:
                coming.receive()

    def need(self, unit: Unit, use: Use | None = None) -> bool:
        """Returns once the values of a unit are there; where they are still coming, ``use`` gets them as they come.

        Returns:
            Whether ``use`` has been given all of them.
        """
        self.order.wish(unit.index)
        coming = self._coming.pop(unit.index, None)
        if coming is None:
            return False
        used = use is not None and self._account.decomposed and not coming.gathering.run.arrived
        coming.receive(use if used else None)
        self._leaving.append(coming)
        return used

    def keep(self, unit: Unit) -> None:
        """Values stay anyway."""

    def drop(self, unit: Unit) -> None:
        """Values stay."""

    def settle(self) -> None:
        """Returns once nothing is in flight, so that shards may be written to."""
        for number in list(self._coming):
            coming = self._coming.pop(number)
            coming.receive()
            self._leaving.append(coming)
        for coming in self._leaving:
            self._account.add("param_all_gather", coming.close())
        self._leaving = []
