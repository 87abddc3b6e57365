"""The backward half: gradients leave as they are made, in the agreed order, and are whole when backward returns.

[Note: one order] Units are begun in one order on every rank: that of :class:`Order`. A unit that is ready before
its turn waits for it, and is then sent as it lies; one that is never ready on this rank holds the others up until
the end of the pass, where all ranks tell each other what they have: what some rank has is sent by all, with zeros
where there is nothing.

[Note: room] What is in flight holds memory, so a pass waits for the oldest of it where there would be more than
suffices (:meth:`_room`). Whoever waits must be sure that the others get there, whatever they leave out. So this is done
where the ranks were alike in the pass before. Then the units that it had are awaited by all: a rank begins those that
it has nothing of, with zeros, before it waits for anything that came later in that pass; at its end the rest of them.

[Note: end of the pass] A callback of the autograd engine runs when the outermost graph has been walked. It is queued by
whatever comes first: the gradient of the model's output, or of a parameter.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Sequence
from functools import reduce
from itertools import takewhile
from math import inf
from operator import or_
from typing import NamedTuple

import torch

from ..errors import naming
from ..transport import CARD_BYTES
from .account import Account
from .channels import Channels
from .choosing import Choosing
from .flight import Reduction
from .journey import Journey, Product, Way
from .order import Order, digest
from .stream import Stream
from .unit import Member, Unit

_USED, _LATE = 1, 2
_FIRST = "alike by construction"


class _Part(NamedTuple):
    """One part of a unit that is in flight."""

    journey: Journey
    ranges: Sequence[tuple[int, int]]
    reduction: Reduction
    room: int
    made: int  # bytes of it that autograd has made, so that they are not in staging


class Gradients:
    """All gradients of one model.

    Args:
        name: of the model, for messages and the report.
        units: in the order of registration.
        channels: of the group.
        way: how gradients travel.
        account: what the report is told.
    """

    def __init__(self, name: str, units: Sequence[Unit], channels: Channels, way: Way, account: Account) -> None:
        self._name, self._units, self._channels, self._way, self._account = name, units, channels, way, account
        self.order = Order(sorted(range(len(units)), key=lambda number: (not units[number].is_trained, -number)))
        self.others: list[Order] = []  # settled together with this one
        self.stream: Stream | None = None
        self.choosing: Choosing | None = None
        self.forwards = 0  # since the last pass: what is gathered again in backward depends on it
        self.sync = True
        self._armed = self._syncing = False
        self._start_s = 0.0
        self._passes = 0  # since gradients were last exchanged
        self._awaited = [{member for member in unit.members if member.leaf.requires_grad} for unit in units]
        self._dirty: set[Member] = set()
        self._shared: set[int] = set()  # weights that were used more than once in a pass
        self._sure = sum(unit.is_trained for unit in units)  # leading units that all ranks await ([Note: room])
        self._alike: Hashable = _FIRST  # the kind of the last pass, None where ranks were not
        self._clear()

    def _clear(self) -> None:
        self._position = 0
        self._fired: list[set[Member]] = [set() for _ in self._units]
        self._ready: set[int] = set()
        self._journeys: dict[int, Journey] = {}
        self._reducing: deque[_Part] = deque()
        self._leaving: deque[_Part] = deque()
        self._in_flight = self._made = 0  # bytes
        self._most = self._room()
        self._bounded = False  # [Note: room]

    @property
    def is_running(self) -> bool:
        """Whether a backward pass is under way."""
        return self._armed

    # --- during backward ----------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """Makes sure that :meth:`_end` runs at the end of this pass ([Note: end of the pass])."""
        if self._armed:
            return
        self._revive()
        self._armed, self._syncing, self._start_s = True, self.sync, time.perf_counter()
        self._passes += 1
        torch.autograd.Variable._execution_engine.queue_callback(self._end)  # pyright: ignore[reportAttributeAccessIssue]
        if self.stream is not None:
            self.stream.begin(("backward", self.forwards), self._keep_up)
        known = self.stream is None or self.stream.is_known
        self._bounded = self._syncing and self._account.overlaps and known and self._alike == self._kind()
        self._count(0, 0)

    def recover(self) -> None:
        """After a pass that an error ended: its exchanges are given up, and the peers are told."""
        if self._armed and not in_backward():
            self.abandon(RuntimeError(f"a backward of {self._name} was ended by an error or another thread"))
        self._revive()

    def _revive(self) -> None:
        if self._channels.failed:
            self._channels.revive()
            self._alike = None  # on all ranks, whatever each of them has come to know

    def accumulated(self, unit: Unit, member: Member) -> None:
        """Autograd has a gradient of ``member``."""
        self.arm()
        self._dirty.add(member)
        if not self._syncing:
            return
        fired = self._fired[unit.index]
        fired.add(member)
        if fired >= self._awaited[unit.index]:
            self.order.wish(unit.index, self._place())
            self._ready.add(unit.index)
            self._go()

    def compute(self, unit: Unit, product: Product) -> bool:
        """Computes and sends the gradient of a linear's weight if it is its turn; else it is left to autograd."""
        self.arm()
        if not self._syncing:
            return False
        if unit.index in self._shared or not self._account.decomposed or not self._fusable(unit):
            return False
        self.order.wish(unit.index, self._place())
        if self._turn() != unit.index:
            return False
        self._next(product)
        self._go()
        return True

    def _fusable(self, unit: Unit) -> bool:
        """Whether nobody else wants to see the gradient on its way to the leaf, and it can be computed in its place."""
        leaf = unit.members[0].leaf
        grad = leaf.grad
        if leaf._backward_hooks or len(leaf._post_accumulate_grad_hooks or ()) > 1:  # pyright: ignore[reportAttributeAccessIssue]
            return False
        return self._way.travels(unit) == unit.dtype and (
            grad is None or (grad.is_contiguous() and grad.dtype == unit.dtype)
        )

    def _go(self) -> None:
        """Begins the units whose turn it is."""
        while self._account.overlaps and self._turn() in self._ready:
            self._next()
        self.poll()

    def _turn(self) -> int | None:
        """The unit that is to be begun next; None where no more are to be before the end of the pass."""
        stop = self._sure if self._bounded else len(self._units)
        return self.order.numbers[self._position] if self._position < stop else None

    def _next(self, product: Product | None = None) -> None:
        number = self.order.numbers[self._position]
        self._position += 1
        if self._bounded and self.stream is not None:
            self.stream.keep_up(self.order.places[number])
        self._begin(self._units[number], product)

    def _keep_up(self, place: float) -> None:
        """Begins what had its turn by a place of the step, with zeros where there is nothing ([Note: room])."""
        while self._bounded and (number := self._turn()) is not None and self.order.places.get(number, 0) <= place:
            self._next()

    def _place(self) -> int:
        return 0 if self.stream is None else self.stream.place

    def _kind(self) -> Hashable:
        """What passes have in common that ask for the same weights in the same order."""
        return _FIRST if self.stream is None else self.stream.phase

    def _begin(self, unit: Unit, product: Product | None = None) -> None:
        self._journeys[unit.index] = journey = self._journey(unit)
        self._send(journey, product)

    def _journey(self, unit: Unit) -> Journey:
        return Journey(unit, self._channels.reduce, self._way)

    def _send(self, journey: Journey, product: Product | None = None) -> None:
        for part, make in zip(journey.unit.parts, journey.begin(product), strict=True):
            room = self._way.room(journey.unit, part, self._channels.rank)
            self._make_room(room)
            made = room // 2 if journey.is_made else 0
            self._count(room, made)
            reduction = make()
            reduction.begin()
            self._reducing.append(_Part(journey, part, reduction, room, made))
            if self._account.overlaps:
                self.poll()
            else:
                self._one_by_one()

    def poll(self) -> None:
        """Takes up, in order, what need not be waited for; of a ring all but the last, since it posts as it goes on."""
        while self._reducing:
            if self._is_ring:
                if not self._bounded or len(self._reducing) == 1:
                    break
            elif not self._reducing[0].reduction.run.arrived:
                break
            self._take_up()
        while self._leaving and self._leaving[0].reduction.run.arrived:
            self._close(self._leaving.popleft())

    @property
    def _is_ring(self) -> bool:
        return self._account.pattern == "ring"

    def _room(self) -> int:
        """Bytes that suffice to begin any unit while something is in flight: if it is computed then, one as large.

        Such a unit is made while the other travels, and a part of it more; another has been made before, and only
        waits for what was begun before it.
        """
        most = largest = 0
        for number in self.order.numbers:
            unit, way = self._units[number], self._way
            parts = [way.room(unit, part, self._channels.rank) for part in unit.parts]
            before, largest = largest, max(parts)
            if unit.linear:
                most = max(most, 2 * unit.total * way.travels(unit).itemsize, sum(parts) + largest)
            else:
                most = max(most, sum(parts) + before)
        return most

    def _make_room(self, room: int) -> None:
        """Waits for the oldest of what is in flight ([Note: room]); of a ring for what it will not post any more."""
        while self._bounded and self._in_flight + room > self._most:
            if self._leaving:
                self._close(self._leaving.popleft())
            elif self._reducing and not self._is_ring:
                self._take_up()
            else:
                break

    def _count(self, room: int, made: int) -> None:
        """So much more is in flight."""
        self._in_flight += room
        self._made += made
        # what lies there unused takes room as well
        self._channels.reduce.staging.most_bytes = self._most - self._made if self._bounded else None

    def _take_up(self) -> None:
        part = self._reducing[0]
        if part.reduction.take_up():
            self._leaving.append(self._reducing.popleft())
            if not part.journey.unit.sharded:
                part.journey.gather(self._channels.gather, part.ranges)

    def _one_by_one(self) -> None:
        """Waits for a reduction, and for the gather behind it, before anything else is done."""
        part = self._reducing.popleft()
        self._close(part)
        if not part.journey.unit.sharded:
            part.journey.gather(self._channels.gather, part.ranges)
            part.journey.gatherings[-1].receive()

    def _close(self, part: _Part) -> None:
        self._account.add("grad_reduce_scatter", part.reduction.close())
        part.journey.part_has_left()
        self._count(-part.room, -part.made)

    # --- at its end ---------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self._armed, self.forwards = False, 0
        try:
            with naming(f"data_parallel {self._name}"):
                kind = self._kind()
                self._keep_up(inf)
                if self.stream is not None:
                    self.stream.end()
                if self._syncing:
                    self._finish(kind)
                else:
                    self._account.forget()
        except BaseException as error:
            self.abandon(error)
            raise

    def abandon(self, error: BaseException) -> None:
        """Gives the pass up; no zero_grad would see what it has left in the leaves of sharded parameters."""
        self._channels.fail(error)
        if self.stream is not None:
            self.stream.give_up()
        for unit in self._units:
            for member in unit.members if unit.sharded else ():
                member.leaf.grad = None
        self._armed, self._passes, self.forwards = False, 0, 0
        self._account.forget()
        self._dirty.clear()
        self._clear()

    def _finish(self, kind: Hashable) -> None:
        flags, alike = self._agree(self._flags())
        used = self._by_unit(flags, _USED)
        for number in self.order.numbers[self._position :]:
            if any(used[number]):
                self._begin(self._units[number])
        self._arrive(self._journeys)
        late = {number: which for number, which in self._by_unit(flags, _LATE).items() if any(which)}
        rests = {number: self._journey(self._units[number]) for number in late}  # before the leaves are written to
        for number, journey in self._journeys.items():
            journey.deliver(used[number], add=False)
        for journey in rests.values():
            self._send(journey)
        self._arrive(rests)
        for number, journey in rests.items():
            journey.deliver(late[number], add=True)
        self._shared.update(late)
        self._awaited = [{member for member in unit.members if flags[member]} for unit in self._units]
        for order in (self.order, *self.others):
            order.settle(alike)
        self._alike = kind if alike else None

        def sure(number: int) -> bool:
            return number in self.order.places and any(used[number])

        self._sure = len(list(takewhile(sure, self.order.numbers)))
        self._passes = 0
        self._dirty.clear()
        if self.stream is not None:
            self.stream.settle()  # what this pass has gathered is a part of this step's record
        self._account.took(self._start_s)
        self._account.enter()
        if self.choosing is not None:
            self.choosing.decide(self.order.numbers)
        self._clear()
        self._channels.reduce.staging.clear()  # the next forward's activations can have it

    def _by_unit(self, flags: dict[Member, int], bit: int) -> dict[int, list[bool]]:
        return {unit.index: [bool(flags[member] & bit) for member in unit.members] for unit in self._units}

    def _flags(self) -> dict[Member, int]:
        """What this rank has of each member: a gradient in flight or in place, and more of it that came later."""
        flags: dict[Member, int] = {}
        for unit in self._units:
            journey = self._journeys.get(unit.index)
            for index, member in enumerate(unit.members):
                has = member.leaf.grad is not None
                if journey is None:
                    flags[member] = _USED * (has and member in self._dirty)
                else:
                    flags[member] = _USED * journey.found[index] + _LATE * has
        return flags

    def _agree(self, flags: dict[Member, int]) -> tuple[dict[Member, int], bool]:
        """What any rank has of each member, and whether all have the same and came to it in the same order."""
        transport, own = self._channels.reduce, bytes(flags.values())
        orders = [self.order, *self.others]
        known = digest([str(self._bounded), *(str(order.numbers) for order in orders)])
        mine = digest([own.hex(), *(order.words() for order in orders)])
        shown = f"data_parallel of {self._name}, gradients of {self._passes} backward passes, orders {known}"
        alike = self._channels.alike(shown, mine)
        if alike:
            return flags, True
        cards = (own[start : start + CARD_BYTES].ljust(CARD_BYTES, b"\0") for start in range(0, len(own), CARD_BYTES))
        told = [transport.exchange_cards(card) for card in cards]
        joined = (b"".join(card[rank] for card in told)[: len(own)] for rank in range(transport.world_size))
        return {member: reduce(or_, bits) for member, bits in zip(flags, zip(*joined, strict=True), strict=True)}, False

    def _arrive(self, journeys: dict[int, Journey]) -> None:
        """Waits for all that is under way."""
        while self._reducing:
            self._take_up()
        gatherings = [gathering for journey in journeys.values() for gathering in journey.gatherings]
        for gathering in gatherings:
            gathering.receive()
        while self._leaving:
            self._close(self._leaving.popleft())
        for gathering in gatherings:
            self._account.add("grad_all_gather", gathering.close())


def in_backward() -> bool:
    """Whether the autograd engine is at work on this thread."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportAttributeAccessIssue]
