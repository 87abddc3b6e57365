"""Last words: what a rank that gives a group up tells its peers, so that all of them blame the same rank.

The first rank to notice a death hangs up. To a third rank, which may be waiting for the first one only, that looks
like the first rank's own death. So a receive for the last words of each peer is posted from the start; whoever gives up
sends them before it closes its connections, and whoever finds a connection closed reads what has come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

_BYTES = 1024
_TAG = 3
_PATIENCE_S = 1.0  # for words that queue behind bulk data
_LOOKS = 10


class LastWords:
    """What the peers of ``rank`` have said before they hung up, and how to say one's own.

    Args:
        rank, world_size: of the group.
        channel: gives the gloo group that carries messages from one rank to another.
    """

    def __init__(self, rank: int, world_size: int, channel: Callable[[int, int], Any]) -> None:
        self._rank, self._channel = rank, channel
        peers = [peer for peer in range(world_size) if peer != rank]
        self._heard = {peer: torch.zeros(_BYTES, dtype=torch.uint8) for peer in peers}
        self._works = [channel(peer, rank).recv([words], peer, _TAG) for peer, words in self._heard.items()]

    def tell(self, words: str) -> None:
        """Says why this rank gives up, to every peer that still listens, and waits a moment until it has left."""
        text = torch.frombuffer(bytearray(words.encode()[:_BYTES].ljust(_BYTES, b"\0")), dtype=torch.uint8)
        works = []
        for peer in self._heard:
            with suppress(RuntimeError):
                works.append(self._channel(self._rank, peer).send([text], peer, _TAG))
        end = time.monotonic() + _PATIENCE_S
        for work in works:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))

    def heard(self, peer: int) -> str:
        """What ``peer`` has said, looking for a moment, since the closing of another connection may overtake it."""
        words = self._heard[peer]
        for look in range(_LOOKS):
            if words[0]:
                break
            time.sleep(0.01 if look else 0)
        return words.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
