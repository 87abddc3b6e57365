"""A tensor whose values are not there yet: it answers what it looks like, and gets its values when they are asked for.

[Note: lazy tensors] Only code between two modules of a plan meets them: they are made after a module's own hooks have
run, and styles know them. They take no part in autograd themselves; what they stand for does. So they must not be
handed to an ``autograd.Function`` or a reentrant checkpoint, and are not written to, which is refused.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_Tensor = torch.Tensor
# what tells nothing of the values
_LOOKS = {
    getattr(_Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_meta", "is_sparse", "is_cpu",
        "is_cuda", "itemsize",
    )
} | {
    _Tensor.size, _Tensor.dim, _Tensor.numel, _Tensor.nelement, _Tensor.element_size, _Tensor.is_floating_point,
    _Tensor.is_complex, _Tensor.__len__, _Tensor.get_device,
}  # fmt: skip


class Lazy(torch.Tensor):
    """A tensor by its looks; see [Note: lazy tensors]."""

    _computed: torch.Tensor | None = None

    def all(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The values, made when they are first asked for."""
        if self._computed is None:
            self._computed = self._made()
        return self._computed

    @abstractmethod
    def _made(self) -> torch.Tensor:
        """The values, made now."""

    def reshaped(self, func: Callable[..., Any], args: Sequence[Any]) -> Lazy | None:
        """What a change of shape gives that needs no values; None where ``func`` is another or no such change.

        This is itself, where nothing changes.
        """
        return self if shape_after(func, self.shape, args[1:]) == self.shape else None

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return f"{type(self).__name__}({list(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: Any) -> Any:
        return self.all().__deepcopy__(memo)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if args and isinstance(args[0], Lazy):
            kept = None if kwargs else args[0].reshaped(func, args)
            if kept is not None:
                return kept
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        if isinstance(kwargs.get("out"), Lazy) or (writes and args and isinstance(args[0], Lazy)):
            raise RuntimeError(
                f"{name} would write to rows that other modules read elsewhere; work on a copy, as in y = x * 1"
            )
        there: Any = tree_map_only(Lazy, lambda lazy: lazy.all(), (tuple(args), dict(kwargs)))
        return func(*there[0], **there[1])

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise RuntimeError(f"{func} came upon a tensor that has no values yet without torch having asked for them")


def shape_after(func: Callable[..., Any], size: Sequence[int], args: Sequence[Any]) -> torch.Size | None:
    """The shape after a view, reshape, flatten or a slice that keeps all, or None where ``func`` is something else.

    Args:
        func: of torch's tensors.
        size: the shape before.
        args: beside the tensor.
    """
    if func is _Tensor.__getitem__:
        index = args[0] if isinstance(args[0], tuple) else (args[0],)
        keeps = all(each is Ellipsis or (isinstance(each, slice) and each in _ALL) for each in index)
        return torch.Size(size) if keeps else None
    known = (_Tensor.reshape, _Tensor.view, _Tensor.flatten, torch.reshape, torch.flatten)
    if func is _Tensor.contiguous:
        return torch.Size(size)
    if func not in known or (args and isinstance(args[0], torch.dtype)):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return func(torch.empty(*size, device="meta"), *args).shape


_ALL = (slice(None), slice(0, None))
