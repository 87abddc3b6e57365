"""What a transport's calls are planned with."""

from __future__ import annotations

import hashlib

from ..drift import Drift
from ..machine import Machine


class Planned:
    """The part of a transport that knows its machine.

    Attributes:
        machine: what calls are planned with, the same on every rank; None where there is none, or none yet.
        machine_name: stands for it between ranks; "" where nobody has set any.
        measures: whether the first call in mode "auto" that is worth it measures a machine.
        drift: watches over the calls that are planned with it.
    """

    machine: Machine | None = None
    machine_name = ""
    measures = True
    drift: Drift | None = None

    def use(self, machine: Machine | None) -> None:
        """Plans with ``machine`` from now on, or without any; every rank must do so at the same call."""
        self.machine, self.measures = machine, False
        digest = hashlib.blake2b(repr(machine).encode(), digest_size=4).hexdigest()
        self.machine_name = "no machine" if machine is None else f"machine {digest}"
        self.drift = None if machine is None else Drift()
