"""What a style is: the part of a plan that says what becomes of one module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from .parallel import Parallel


class Parts(NamedTuple):
    """The placement of a parameter that holds several side by side, each of which is sharded by itself.

    Args:
        dim: the dimension along which they lie.
        sizes: of each.
        placements: of each.
    """

    dim: int
    sizes: tuple[int, ...]
    placements: tuple[Any, ...]


class Style(ABC):
    """What a plan does with a module: :meth:`placements` looks and may refuse, :meth:`apply` then changes it.

    All modules of a model are looked at before the first one is changed, so that a refused plan leaves it as it was.
    """

    @abstractmethod
    def placements(self, module: nn.Module, name: str, parallel: Parallel) -> dict[str, Any]:
        """Where each parameter goes that this style takes care of, by its name below the module.

        Returns:
            A torch placement (Shard, Replicate) or :class:`Parts` for each.

        Raises:
            ValueError, TypeError: this module cannot be given this style.
        """

    @abstractmethod
    def apply(self, module: nn.Module, parallel: Parallel) -> None:
        """Changes what the module does; its parameters are DTensors by now."""

    def words(self) -> str:
        """The style in words that are equal on all ranks."""
        given = (f"{name}={getattr(value, '__name__', repr(value))}" for name, value in vars(self).items())
        return f"{type(self).__name__}({', '.join(given)})"

    __repr__ = words


def shard(size: int, dim: int, parallel: Parallel, what: str) -> Shard:
    """Shard(dim) of a dimension of this size, by the rule of torch.chunk; refuses to leave a rank without any."""
    chunks = torch.empty(size, device="meta").chunk(parallel.world_size)
    if len(chunks) < parallel.world_size:
        raise ValueError(
            f"{what} {size} over {parallel.world_size} ranks in chunks of {chunks[0].numel() if size else 0} leaves "
            f"{parallel.world_size - len(chunks)} of them with nothing"
        )
    return Shard(dim)


def replicated(module: nn.Module, below: str = "") -> dict[str, Any]:
    """All parameters of a module, whole on every rank."""
    return {f"{below}{name}": Replicate() for name, _ in module.named_parameters()}


def submodules(module: nn.Module, names: Sequence[str | None]) -> list[nn.Module]:
    """The submodules of these names, without those that are None.

    Raises:
        ValueError: there is no such submodule.
    """
    found = []
    for name in names:
        if name is None:
            continue
        try:
            found.append(module.get_submodule(name))
        except AttributeError:
            known = ", ".join(child for child, _ in module.named_children())
            raise ValueError(f"{type(module).__name__} has no submodule {name!r}; it has {known}") from None
    return found
