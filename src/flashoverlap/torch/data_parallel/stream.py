"""Weights that are gathered for each use and dropped after it: what ``shard="parameters"`` does with linears.

[Note: tapes] Ranks must gather the same weights in the same order, and before they are needed. So the weights that
a forward, or a backward, needs are put on a tape the first time, one after another and with all ranks agreeing on
each. From then on the tape is followed, a weight ahead. A rank that skips a branch gathers the branch's weights in
vain, so that the others are not left alone; one that needs what is not on the tape says so and stops, and the
others with it.

[Note: storage] The whole weight is one tensor for as long as the model lives, which autograd may keep: its storage
comes and goes. Where a graph has kept it without this module knowing (the weight was read as an attribute), it
stays until the next step of the optimizer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence

import torch

from ..transport import agree
from .account import Account
from .channels import Channels
from .flight import Gathering, Use
from .unit import Unit

_AHEAD = 1  # weights that are under way while one is used


class Stream:
    """The weights of one model's linears, whole only while they are used.

    Args:
        name: of the model, for messages.
        units: of the linears.
        channels: of the group.
        account: what the report is told.
    """

    def __init__(self, name: str, units: Sequence[Unit], channels: Channels, account: Account) -> None:
        self._name, self._channels, self._account = name, channels, account
        self._units = {unit.index: unit for unit in units}
        self._tapes: dict[Hashable, list[int]] = {}
        self._stop()
        self._coming: dict[int, Gathering] = {}
        self._here: set[int] = set()
        self._kept: set[int] = set()
        self._leaving: deque[Gathering] = deque()
        for unit in units:
            self._free(unit)

    def _stop(self) -> None:
        self.phase: Hashable = None
        self._before: Callable[[int], None] | None = None
        self._tape: list[int] | None = None  # None while it is being recorded
        self._record: list[int] = []
        self._next = self._posted = 0

    # --- phases -------------------------------------------------------------------------------------------------------

    def begin(self, phase: Hashable, before: Callable[[int], None] | None = None) -> None:
        """A forward or a backward begins; the first weights of its tape are sent for.

        Args:
            before: called with a place of a known tape before the weight there is waited for.
        """
        self._stop()
        self.phase, self._tape, self._before = phase, self._tapes.get(phase), before
        if self._tape is not None and self._account.overlaps:
            self._post_up_to(_AHEAD)

    def end(self) -> None:
        """It is over: what was left out is gathered in vain ([Note: tapes]), or the tape is kept."""
        if self._tape is not None:
            self.keep_up(len(self._tape))
        elif self.phase is not None:
            self._tapes[self.phase] = self._record
        self._stop()
        self._poll()

    @property
    def is_known(self) -> bool:
        """Whether there is a tape for this phase."""
        return self._tape is not None

    @property
    def place(self) -> int:
        """How many weights of this phase have been needed so far."""
        return len(self._record) if self._tape is None else self._next

    def keep_up(self, place: int) -> None:
        """Gathers in vain what came before a place of the tape and has been left out."""
        tape = self._tape or []
        for at in range(self._next, min(place, len(tape))):
            self._post_up_to(at + 1 + self._ahead)
            self._next = at + 1
            self._arrive(tape[at], None)
            self.drop(self._units[tape[at]])

    @property
    def _ahead(self) -> int:
        return _AHEAD if self._account.overlaps else 0

    def settle(self) -> None:
        """Returns once nothing leaves any more, so that shards may be written to."""
        for gathering in self._leaving:
            self._account.add("param_all_gather", gathering.close())
        self._leaving.clear()

    def _poll(self) -> None:
        while self._leaving and self._leaving[0].run.arrived:
            self._account.add("param_all_gather", self._leaving.popleft().close())

    def give_up(self) -> None:
        """Forgets what an error has left behind."""
        self._stop()
        self._coming.clear()
        self._leaving.clear()

    def has(self, unit: Unit) -> bool:
        """Whether a unit's weight is one of these."""
        return unit.index in self._units

    # --- weights ------------------------------------------------------------------------------------------------------

    def need(self, unit: Unit, use: Use | None = None) -> bool:
        """Returns once a weight is whole; where it is still coming, ``use`` gets it as it comes.

        Returns:
            Whether ``use`` has been given all of it.
        """
        number = unit.index
        if number in self._here and number not in self._coming:
            return False
        if self._tape is None:
            self._agree_on(unit)
        else:
            self._follow(unit)
        decomposed = use is not None and self._account.decomposed and not self._coming[number].run.arrived
        self._arrive(number, use if decomposed else None)
        return decomposed

    def _agree_on(self, unit: Unit) -> None:
        transport = self._channels.stream
        shown = f"data_parallel of {self._name}, {self.phase} needs {unit.name}"
        agree(transport, shown, shown)
        self._record.append(unit.index)
        self._post(unit.index)

    def _follow(self, unit: Unit) -> None:
        assert self._tape is not None
        if unit.index not in self._tape[self._next :]:
            error = RuntimeError(
                f"data_parallel of {self._name}: {unit.name} is needed where it was not the first time, and other "
                'ranks may not need it; shard="gradients" has all weights at hand'
            )
            self._channels.fail(error)
            raise error
        at = self._tape.index(unit.index, self._next)
        if self._before is not None:
            self._before(at)
        self.keep_up(at)
        self._post_up_to(at + 1 + self._ahead)
        self._next = at + 1

    def _post_up_to(self, stop: int) -> None:
        assert self._tape is not None
        while self._posted < min(stop, len(self._tape)):
            number = self._tape[self._posted]
            if number in self._coming:  # again before its last use is over
                break
            self._posted += 1
            self._post(number)

    def _post(self, number: int) -> None:
        unit = self._units[number]
        (member,) = unit.members
        if number not in self._here:
            storage = member.value.untyped_storage()
            storage.resize_(member.value.nbytes)
        rank, value, shard = self._channels.rank, member.value, member.shard()
        blocks = [value[start:stop] for start, stop in zip(member.starts, member.starts[1:], strict=False)]
        blocks[rank].copy_(shard)
        blocks[rank] = shard  # the whole weight may be dropped before the own piece has left
        self._coming[number] = Gathering(self._channels.stream, self._account.pattern, blocks, len(unit.parts))

    def _arrive(self, number: int, use: Use | None) -> None:
        gathering = self._coming.pop(number)
        gathering.receive(use)
        self._here.add(number)
        self._leaving.append(gathering)

    def keep(self, unit: Unit) -> None:
        """A weight is read by others: it stays ([Note: storage])."""
        self._kept.add(unit.index)

    def drop(self, unit: Unit) -> None:
        """A weight has been used."""
        if unit.index in self._here and unit.index not in self._kept:
            if self._account.pattern == "ring":  # pieces of others may not have been handed on yet
                self.settle()
            self._free(unit)
            self._poll()

    def _free(self, unit: Unit) -> None:
        self._here.discard(unit.index)
        unit.members[0].value.untyped_storage().resize_(0)

    def stepped(self) -> None:
        """The optimizer has changed the shards: nothing whole is of use any more, nor to graphs that have kept it."""
        self._kept.clear()
        for number in list(self._here):
            self._free(self._units[number])
        for unit in self._units.values():
            torch.autograd.graph.increment_version(unit.members[0].leaf)


def is_streamed(unit: Unit, shard: str) -> bool:
    """Whether a unit's weight is dropped after each use."""
    return shard == "parameters" and unit.linear
