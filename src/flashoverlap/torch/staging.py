"""Buffers that are kept from call to call, so that no call pays for fresh pages."""

from __future__ import annotations

import torch


class Staging:
    """A free list of flat byte buffers of one device.

    [Note: staging lifetime] A buffer belongs to one call: taken when the call begins, given back when the call has
    drained its sends. A call that fails gives nothing back, since transfers into its buffers may still be in flight;
    the transport and its staging are then left to the garbage collector together.

    Attributes:
        most_bytes: of buffers taken and free together, beyond which the longest unused go before one is made; None
            where all are kept.
    """

    def __init__(self, most: int = 32) -> None:
        self._free: list[torch.Tensor] = []
        self._most = most
        self._taken = 0  # bytes
        self.most_bytes: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes that lie in the free list."""
        return sum(buffer.numel() for buffer in self._free)

    def take(self, bytes: int, device: torch.device) -> torch.Tensor:
        """A flat uint8 buffer of at least ``bytes`` bytes: the smallest free one that serves, or a new one."""
        fitting = [b for b in self._free if b.numel() >= bytes and b.device == device]
        if fitting:
            best = min(fitting, key=torch.Tensor.numel)
            # far too large a buffer is better kept for the call that needs it
            if best.numel() <= max(4 * bytes, 1 << 16):
                self._free = [b for b in self._free if b is not best]
                self._taken += best.numel()
                return best
        if self.most_bytes is not None:
            over = self._taken + self.bytes + bytes - self.most_bytes
            while over > 0 and self._free:
                over -= self._free.pop(0).numel()
        self._taken += bytes
        return self.fresh(bytes, device)

    def fresh(self, bytes: int, device: torch.device) -> torch.Tensor:
        """A new buffer; its content means nothing."""
        with torch.inference_mode(False):  # an inference tensor could not be written to by a later training step
            return torch.empty(bytes, dtype=torch.uint8, device=device)

    def give(self, buffers: list[torch.Tensor]) -> None:
        """Puts buffers back; beyond ``most`` the longest unused ones are let go."""
        self._free += buffers
        self._taken -= sum(buffer.numel() for buffer in buffers)
        del self._free[: max(0, len(self._free) - self._most)]

    def clear(self) -> None:
        """Lets all go that lie in the free list."""
        self._free = []


class Lease:
    """What one call has taken from a Staging: :meth:`tensor` hands out, :meth:`close` gives all back."""

    def __init__(self, staging: Staging, device: torch.device) -> None:
        self._staging, self._device = staging, device
        self._taken: list[torch.Tensor] = []

    def tensor(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous ``[rows, columns]`` tensor, valid until :meth:`close`."""
        count = rows * columns * dtype.itemsize
        buffer = self._staging.take(count, self._device)
        self._taken.append(buffer)
        with torch.inference_mode(False):  # or the backend's threads could not write to the view
            return buffer[:count].view(dtype).view(rows, columns)

    def close(self) -> None:
        """Gives the buffers back; the tensors must not be used afterwards."""
        self._staging.give(self._taken)
        self._taken = []
