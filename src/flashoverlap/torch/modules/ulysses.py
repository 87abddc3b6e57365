"""UlyssesAttention: self-attention with the sequence sharded in and out, and heads sharded inside.

B sequences of S tokens, n ranks, rank r; C features, H query heads, G key/value heads
x_shard   [B, S_r, C]     rows of rank r (those of torch.tensor_split)
weights   of q, k, v and out, whole on every rank

x_shard -> linear_all_to_all -> own heads of q, k, v, all rows -> rotary -> attention_all_to_all_linear -> own rows

The idea is DeepSpeed-Ulysses (arXiv 2309.14509); the all-to-alls hide behind the projections and the attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...overlap import Overlap
from ..call import Call, eager
from ..check import check_overlap, shape
from ..connected import Connected
from ..functional import all_gather, attention_all_to_all_linear, linear_all_to_all, sum_gradient
from ..functional.scores import Kernel
from ..functional.shares import features_of
from ..transport import refusing, transport_of
from .heads import spread

Rotary = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class UlyssesAttention(Connected, nn.Module):
    """Self-attention of sequences that are sharded over the ranks of a group.

    Each rank computes some of the heads, for all rows. Where ranks are no more than key/value heads, these are spread
    over them with their query heads, as ``torch.tensor_split`` does it; otherwise ranks share a key/value head, and its
    query heads are spread over them. A rank may be left without heads.

    Args:
        q: linear with weight ``[H * D, C]``, equal on all ranks like the others; any may have a bias.
        k: ``[G * D, C]``.
        v: ``[G * E, C]``.
        out: ``[N, H * E]``.
        num_heads: H.
        num_kv_heads: G, a divisor of H; H unless given.
        group: process group or one-dimensional DeviceMesh.
        causal: whether a query reads the keys up to its own position alone.
        window: None, or with ``causal`` how many keys a query reads at most, itself the last.
        dropout: probability with which a weight of the softmax is dropped in training; masks differ between heads.
        scale: of the scores; None is ``D ** -0.5``.
        kernel: a function of the caller's for attention, as :func:`attention_reduce_scatter` takes it.
        sum_gradients: whether gradients of weights and biases are summed over the group. False leaves that to data
            parallelism over the same ranks; until then they are those of the own rows.
        overlap: how to overlap.

    Raises:
        TypeError: projections that are no plain linears.
        ValueError: heads that do not fit the weights or each other.
    """

    cannot_be_pickled = "UlyssesAttention holds a process group and cannot be pickled; save its state_dict()"

    def __init__(
        self,
        q: nn.Linear,
        k: nn.Linear,
        v: nn.Linear,
        out: nn.Linear,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        group: Any,
        causal: bool = False,
        window: int | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        kernel: Kernel | None = None,
        sum_gradients: bool = True,
        overlap: Overlap = Overlap(),
    ) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = q, k, v, out
        self.num_heads, self.num_kv_heads = num_heads, num_heads if num_kv_heads is None else num_kv_heads
        self.dropout, self.sum_gradients = dropout, sum_gradients
        self._options = {"causal": causal, "window": window, "scale": scale, "kernel": kernel}
        self._call = {"group": group, "overlap": overlap}
        self._check_heads()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self._call)] = self._call  # a process group cannot be copied, and need not be
        return super().__deepcopy__(memo)

    @eager
    def forward(
        self,
        x_shard: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        rotary: tuple[torch.Tensor, torch.Tensor] | Rotary | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the whole sequences, own rows in and out.

        Args:
            x_shard: ``[B, S_r, C]``.
            mask: None, or broadcastable to ``[B, H, S, S]``: of all heads and all rows, the same on every rank.
            rotary: None; or ``(cos, sin)`` of the own rows at their global positions, ``[S_r, F]`` or ``[B, S_r, F]``,
                which are gathered; or a function that gives them for position ids of all rows, where nothing is moved
                but ``position_ids``. The first F features of queries and keys are rotated, first half against second.
                They get no gradient.
            position_ids: of the own rows, ``[S_r]`` or ``[B, S_r]``, for a function ``rotary``; else 0 to S - 1.

        Returns:
            The own rows ``[B, S_r, N]``.

        Raises:
            ValueError, TypeError: on every rank before anything moves, for arguments that do not fit together or differ
                between ranks.
            PeerError: a peer refused the call, died or stalled.
        """
        transport = transport_of(self._call["group"], type(self).__name__, x_shard)
        with refusing(transport):
            self._check_arguments(x_shard, mask, rotary, position_ids)
        self._agree(transport, x_shard, mask, rotary, position_ids)
        heads = spread(self.num_heads, self.num_kv_heads, transport.world_size)
        queries, _ = heads[transport.rank]
        q, k, v = self._project(x_shard, heads)
        if rotary is not None:
            cos, sin = self._rotation(transport, rotary, position_ids, q)
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
            mask = mask.narrow(-3, queries.start, len(queries))
        return attention_all_to_all_linear(
            q,
            k,
            v,
            self._own(self.out.weight),
            self._own(self.out.bias),
            mask=mask,
            dropout=self.dropout if self.training else 0.0,
            shares=[features_of(own, self._sizes[2]) for own, _ in heads],
            **self._options,
            **self._call,
        )

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Features of one head of q, k and v."""
        return (
            self.q.out_features // self.num_heads,
            self.k.out_features // self.num_kv_heads,
            self.v.out_features // self.num_kv_heads,
        )

    def _own(self, parameter: torch.Tensor | None) -> Any:
        """A parameter that is used on own rows."""
        if parameter is None or not self.sum_gradients:
            return parameter
        return sum_gradient(parameter, **self._call)

    def _project(self, x_shard: torch.Tensor, heads: Sequence[tuple[range, range]]) -> list[torch.Tensor]:
        """q, k and v of the own heads ``[B, heads, S, features]``."""
        linears = (self.q, self.k, self.v)
        shares = [[features_of(own[index > 0], size) for own in heads] for index, size in enumerate(self._sizes)]
        weights, biases = ([self._own(getattr(each, name)) for each in linears] for name in ("weight", "bias"))
        rows = linear_all_to_all(x_shard, weights, biases, shares=shares, dim=1, **self._call)
        return [
            each.view(*each.shape[:2], each.shape[2] // size, size).transpose(1, 2)
            for each, size in zip(rows, self._sizes, strict=True)
        ]

    def _rotation(
        self,
        transport: Any,
        rotary: tuple[torch.Tensor, torch.Tensor] | Rotary,
        position_ids: torch.Tensor | None,
        q: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of all rows, ``[1 or B, 1, S, F]``."""
        batch, _, rows, _ = q.shape
        if not callable(rotary):
            cos, sin = all_gather(torch.cat(rotary, -1), dim=-2, **self._call).chunk(2, -1)
        else:
            positions = torch.arange(rows, device=q.device)
            if position_ids is not None:  # whole numbers up to 2**53 are themselves in float64
                gathered = all_gather(position_ids.double()[..., None], dim=-2, **self._call)
                positions = gathered[..., 0].to(position_ids.dtype)
            with refusing(transport):
                cos, sin = self._check_rotation(rotary(positions), batch, rows)
        return cos.unsqueeze(-3), sin.unsqueeze(-3)

    def _check_heads(self) -> None:
        heads, key_heads = self.num_heads, self.num_kv_heads
        if heads < 1 or key_heads < 1 or heads % key_heads:
            raise ValueError(f"{heads} query heads cannot share {key_heads} key/value heads")
        for name in ("q", "k", "v", "out"):
            if getattr(type(getattr(self, name)), "forward", None) is not nn.Linear.forward:
                raise TypeError(f"{name} must be an nn.Linear as it is, not a {type(getattr(self, name)).__name__}")
        for name, count in (("q", heads), ("k", key_heads), ("v", key_heads)):
            features = getattr(self, name).out_features
            if features % count:
                raise ValueError(f"{count} heads cannot share the {features} output features of {name}")
        of_query, of_key, of_value = self._sizes
        if of_query != of_key:
            raise ValueError(f"heads of q have {of_query} features, and those of k {of_key}")
        if self.out.in_features != heads * of_value:
            raise ValueError(f"out has {self.out.in_features} input features, and the heads {heads} x {of_value}")

    def _agree(self, transport: Any, x_shard: torch.Tensor, mask: Any, rotary: Any, position_ids: Any) -> None:
        """Makes sure that all ranks are given the same kinds of arguments, of which not all are exchanged later."""
        kind = "none" if rotary is None else "a function" if callable(rotary) else "cos and sin"
        dropout = self.dropout if self.training else 0.0
        said = f"mask={mask is not None} rotary={kind} position_ids={position_ids is not None} dropout={dropout}"
        call = Call(type(self).__name__, transport, self._call["overlap"], x_shard)
        call.agree("", said, f"x {shape(x_shard)}, {said}")

    def _check_arguments(self, x_shard: Any, mask: Any, rotary: Any, position_ids: Any) -> None:
        name = type(self).__name__
        check_overlap(name, self._call["overlap"])
        if not isinstance(x_shard, torch.Tensor) or x_shard.dim() != 3:
            raise ValueError(f"{name}: x_shard must be [B, S_r, C], not {getattr(x_shard, 'shape', x_shard)}")
        for what, given in (("mask", mask), ("position_ids", position_ids)):
            if given is not None and not isinstance(given, torch.Tensor):
                raise TypeError(f"{name}: {what} must be a tensor or None, not {type(given).__name__}")
        if mask is not None and mask.dim() > 2 and mask.shape[-3] not in (1, self.num_heads):
            raise ValueError(f"{name}: mask {tuple(mask.shape)} is not one of all {self.num_heads} heads")
        if position_ids is not None and not callable(rotary):
            raise ValueError(f"{name}: position_ids go with a function rotary, which reads them")
        if position_ids is not None and position_ids.shape[-1:] != x_shard.shape[1:2]:
            raise ValueError(f"{name}: position_ids {tuple(position_ids.shape)} of {x_shard.shape[1]} own rows")
        if rotary is not None and not callable(rotary):
            self._check_rotation(rotary, *x_shard.shape[:2])

    def _check_rotation(self, rotation: Any, batch: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, which fit the rows and the heads."""
        name, features = type(self).__name__, self._sizes[0]
        pair = tuple(rotation) if isinstance(rotation, Sequence) else (rotation,)
        if len(pair) != 2 or not all(isinstance(each, torch.Tensor) for each in pair):
            kinds = ", ".join(type(each).__name__ for each in pair)
            raise TypeError(f"{name}: rotary must be or give two tensors, cos and sin, not ({kinds})")
        cos, sin = pair
        sizes = f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)}"
        if cos.shape != sin.shape or tuple(cos.shape[:-1]) not in ((rows,), (1, rows), (batch, rows)):
            raise ValueError(f"{name}: {sizes} of {rows} rows of {batch} sequences")
        if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
            raise ValueError(f"{name}: {sizes} are trainable, and would get no gradient")
        if cos.shape[-1] % 2 or cos.shape[-1] > features:
            raise ValueError(f"{name}: {sizes} of heads with {features} features; halves of them are rotated")
        return cos, sin


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x [B, heads, S, D]``, of which the features that ``cos`` and ``sin`` have are rotated."""
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned.to(x.dtype), rest], -1)
