"""The mode that a model's steps take where that was left open: decided at the end of the first backward pass, and anew
where the group has come by another machine since, by a calibration or a look at the wire.

[Note: when it is decided] By then every rank knows how many tokens its linears have, in which order units are used is
agreed on, and nothing is in flight: the next step may take another mode and other splits. All ranks are there, whatever
they have left out. They plan with the most tokens that any of them has, so that each finds the same. Machines change on
all ranks at the same call.

[Note: watched] The seconds of each step that was planned in mode "auto" go to the Drift of the group, beside those of
its operators. That a rank wants a look at the wire goes along with what all tell each other at the end of the next
backward (:meth:`Channels.alike`), so watching costs no message; there all look, and plan anew if there is cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ... import choice
from ...machine import Machine
from ...overlap import Overlap
from ...step_plan import Layer, StepPlan, plan_step
from ..call import REPORT
from ..wire import gathered
from .account import Account
from .channels import Channels
from .unit import Unit

_A_CARD = 128  # numbers that ranks tell each other at once
_MOST_PIECES = 2048  # of all layers together: a plan for more takes seconds, and the rule of thumb stays


class Choosing:
    """What is left to decide for one model.

    Args:
        units: of the model.
        channels: of the group.
        account: told of the mode.
        shard: as data_parallel takes it.
        overlap: what was asked for.
    """

    def __init__(
        self, units: Sequence[Unit], channels: Channels, account: Account, shard: str, overlap: Overlap
    ) -> None:
        self._units, self._channels, self._account = list(units), channels, account
        self._shard, self._overlap = shard, overlap
        self._fixed = channels.world_size == 1 or overlap.pattern != "direct"
        self._parts = {unit: len(unit.parts) for unit in self._units}  # where exchanges overlap, as memory allows
        channels.watched = overlap.mode == "auto" and not self._fixed  # [Note: watched]
        self._decided = False
        self._machine: Machine | None = None  # that was planned with

    def decide(self, order: Sequence[int]) -> None:
        """Decides, where that is due ([Note: when it is decided]); then it is a collective.

        Args:
            order: in which the units' gradients were ready, first to last.
        """
        self._watch()
        known = None if self._fixed else self._channels.machine
        if self._fixed or (self._decided and known in (None, self._machine)):
            if known is None:  # the mode stays, and nothing is said of it any more
                self._machine = None
                self._account.predict(None)
            return
        units = self._trained([self._units[number] for number in reversed(order)])
        nbytes = sum(map(_bytes, units))
        self._account.predict(None)
        if self._shard != "none" and 2 * nbytes < sum(map(_bytes, self._units)):
            self._decided, self._machine = True, known
            return  # most of what moves is frozen, and no plan knows of that
        left_open = self._overlap.mode == "auto"
        if known is None and left_open and nbytes:
            known = self._channels.measured(max(units, key=_bytes).dtype, nbytes, REPORT.note)
        self._decided, self._machine = True, known
        if known is not None and known.matmul is not None:
            self._plan(units, nbytes, known)
        elif left_open and not self._overlap.splits and nbytes < choice.WORTH_BYTES:
            self._account.take("off", "small", f"{nbytes} bytes are too few to overlap without a plan")

    def _watch(self) -> None:
        """Enters the step that ends here, and looks at the wire where a rank wishes ([Note: watched])."""
        drift = self._channels.drift if self._channels.watched else None
        if drift is not None and self._account.last is not None:
            kind, seconds = self._account.last
            drift.enter((kind, *(unit.tokens for unit in self._units)), seconds)
        if found := self._channels.look():
            REPORT.note(f"data_parallel, {self._account.site}: {found}; planned anew from the next step on")

    def _trained(self, units: Sequence[Unit]) -> dict[Unit, Layer]:
        """Those units that want gradients, with the tokens of the rank that has most."""
        own = [float(4 * unit.tokens + 2 * unit.chained + unit.is_trained) for unit in units]
        most: list[int] = []
        for start in range(0, len(own), _A_CARD):
            ranks = gathered(self._channels.reduce, own[start : start + _A_CARD])
            most += (int(max(each)) for each in zip(*ranks, strict=True))
        told = zip(units, most, strict=True)
        return {unit: _layer(unit, each // 4, bool(each & 2), self._parts[unit]) for unit, each in told if each & 1}

    def _plan(self, units: Mapping[Unit, Layer], nbytes: int, machine: Machine) -> None:
        in_linears = sum(_bytes(unit) for unit, layer in units.items() if layer.tokens)
        if not units or (nbytes >= choice.WORTH_BYTES and 2 * in_linears < nbytes):
            return  # what they hide behind is computed by others, of which no plan knows
        layers, ranks = list(units.values()), self._channels.world_size
        if len(layers) * ranks > _MOST_PIECES:
            return
        found = plan_step(layers, machine, ranks=ranks, shard=self._shard, overlap=self._overlap)
        if self._overlap.mode == "auto":
            self._take(units, found)
        self._account.predict((found.predicted_s, found.exposed_s))

    def _take(self, units: Mapping[Unit, Layer], found: StepPlan) -> None:
        mode, _, splits, *_ = found.choice
        for unit in self._units:
            unit.cut(self._parts[unit] if mode == "flash" else 1)
        first = next((unit for unit, layer in units.items() if layer.tokens), None)
        cut = mode == "flash" and first is not None and not self._overlap.splits
        if cut and first is not None:
            first.cut(splits)
        self._account.take(mode, found.code, found.reason, splits if cut else 0)


def _layer(unit: Unit, tokens: int, chained: bool, parts: int) -> Layer:
    if not tokens:
        return Layer(max(unit.sizes), unit.dtype.itemsize)
    (member,) = unit.members
    row_bytes = member.width * unit.dtype.itemsize
    return Layer(max(member.rows), row_bytes, member.width, tokens, chained, parts)


def _bytes(unit: Unit) -> int:
    return unit.total * unit.dtype.itemsize
