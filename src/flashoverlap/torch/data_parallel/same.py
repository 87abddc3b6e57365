"""Equal values on all ranks to begin with: those of rank 0, where they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from ..transport import CARD_BYTES
from .flight import Gathering


def make_same(transport: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Gives every rank the values of rank 0 in place; nothing moves but a digest where they are equal already."""
    digest = hashlib.blake2b(digest_size=32)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    if len(set(transport.exchange_cards(digest.digest().ljust(CARD_BYTES, b"\0")))) == 1:
        return
    for tensor in tensors:
        flat = tensor.detach().contiguous().flatten().view(torch.uint8)
        gathering = Gathering(transport, "direct", [flat, *[flat[:0]] * (transport.world_size - 1)])
        gathering.receive()
        gathering.close()
        with torch.no_grad():
            tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))
