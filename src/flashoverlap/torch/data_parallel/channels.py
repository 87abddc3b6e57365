"""The transports of a data-parallel model: for gradients on their way to their owners, and for what owners give back.

[Note: several channels] On one transport all ranks must post in one order. What is summed can be sent on as soon as
it is there, which is at different times on different ranks: so it has a transport, and an order, of its own. So
have weights that are gathered while gradients are on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...drift import Drift
from ...machine import Machine
from ..calibrate import alone, at_first_use, failing_together
from ..errors import PeerError
from ..look import look
from ..transport import agree_twice, known_transport, new_transport, transport_of


class Channels:
    """Private transports over the ranks of a group.

    Args:
        op: public name of the operator, for error messages.
        group: process group, mesh or transport; a transport serves for both.
        device: of the model.
        streams: whether weights are gathered during backward.

    Attributes:
        watched: whether all ask for a look at the wire where their Drift of the group wants one.
        look_due: whether a rank has asked for one at the last agreement; the same on every rank.
    """

    def __init__(self, op: str, group: Any, device: torch.device, streams: bool) -> None:
        self._op, self._group, self._device, self._streams = op, group, device, streams
        self.watched = self.look_due = False
        self._open()

    def _open(self) -> None:
        like = torch.empty(0, device=self._device)
        self.reduce = new_transport(self._group, self._op, like)
        self.gather = new_transport(self._group, self._op, like)
        self.stream = new_transport(self._group, self._op, like) if self._streams else self.gather
        self.rank: int = self.reduce.rank
        self.world_size: int = self.reduce.world_size

    @property
    def failed(self) -> bool:
        """Whether an error has left transfers unfinished."""
        return self.reduce.failed or self.gather.failed or self.stream.failed

    def fail(self, error: BaseException) -> None:
        """Gives all up; the peers are told."""
        self.reduce.fail(error)
        self.gather.fail(error)
        self.stream.fail(error)

    def revive(self) -> None:
        """Makes new ones after a failure, a collective of the group.

        Raises:
            PeerError: the group was given as a transport, which cannot be made anew, or a rank is gone.
        """
        if not self.failed:
            return
        if self.reduce is self.gather and self.world_size > 1:
            raise PeerError(f"{self._op}: the transport that was given has failed")
        self._open()

    @property
    def machine(self) -> Machine | None:
        """What calls of the group are planned with, the same on every rank; None where none is known."""
        known = self._known()
        return None if known is None else known.machine

    @property
    def drift(self) -> Drift | None:
        """What watches over the calls of the group; None where it has no machine."""
        known = self._known()
        return None if known is None else known.drift

    def _known(self) -> Any | None:
        return known_transport(self._group, torch.empty(0, device=self._device))

    def measured(self, dtype: torch.dtype, nbytes: int, tell: Callable[[str], None]) -> Machine | None:
        """The same, measured first where there is none yet and the model is worth it. Collective.

        Args:
            dtype: of the matmuls.
            nbytes: of the model.
            tell: takes what is wrong with a machine that was kept.
        """
        transport = transport_of(self._group, self._op, torch.empty(0, device=self._device))
        at_first_use(transport, dtype, self._device, nbytes, tell)
        return transport.machine

    def alike(self, shown: str, number: int) -> bool:
        """Whether all ranks, which must be in the same call, have the same number. Collective.

        Sets :attr:`look_due`: what each rank wishes goes along.
        """
        drift = self.drift if self.watched else None
        said = agree_twice(self.reduce, shown, shown, number, drift is not None and drift.wants_look)
        self.look_due = any(wish for _, wish in said)
        return len({theirs for theirs, _ in said}) == 1

    def look(self) -> str:
        """Looks at the group's wire (:func:`~flashoverlap.torch.look.look`), where that is due. Collective then.

        Raises:
            RuntimeError: an operator is running on the group.
            PeerError: the group's transport has failed.
        """
        if not self.look_due:
            return ""
        self.look_due, op, known = False, f"{self._op}, a look at the wire", self._known()
        if known is None:  # on this rank alone
            raise PeerError(f"{op}: the group's transport has failed since its machine was measured")
        with failing_together(known), alone(known, op):
            return look(known, self._device)

    def __deepcopy__(self, memo: Any) -> Channels:
        return self  # connections cannot be copied, and need not be
