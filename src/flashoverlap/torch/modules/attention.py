"""ParallelAttention: heads spread over the ranks, around a model's own attention code.

B sequences of S tokens, K features, H query heads and G key/value heads of D features, n ranks, rank r
hidden   [B, S_r, K] own rows in; q [B, S, H/n * D], k and v [B, S, G/n * D] all rows of the own heads, by one gather;
         then the model's own code (rotary positions, masks, cache: all of the whole sequence); own rows out.

Where G is less than n, n/G ranks share a key/value head: its weights are whole on every rank, which uses the rows of
its own head, and their gradients are summed over all ranks.

Under Ulysses own rows are a part of those of an up, of which each rank of tp has some heads; these are spread over up
for the length of the model's own code (head_exchange.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from ..functional.shares import Shares
from .head_exchange import become_heads_row, into_heads
from .heads import HeadShare
from .lazy_attention import PutOff
from .lazy_rows import LazyRows, own_rows
from .linear import RowParallel, become_column, column_placements, columns, is_transposed
from .parallel import Parallel, Parallelized, become
from .random import of_this_rank
from .rows import become_whole, same_dropout
from .style import Style, replicated, submodules

# what attention modules keep of their sizes, beside what this style is told
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_GROUPS = ("num_key_value_groups", "n_rep")


class Attention(Parallelized):
    """An attention module of which each rank computes some heads."""

    takes_one = False

    _columns: Sequence[str]
    _hidden: str
    _shares: Sequence[Shares]
    _told: set[str]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, with q, k and v made beforehand."""
        hidden = args[0] if args else kwargs[self._hidden]
        linears: Any = [self.get_submodule(name) for name in self._columns]
        up = self._parallel.up
        outputs = columns(hidden, linears) if up is None else into_heads(hidden, linears, self._shares)
        ready = dict(zip(linears, outputs, strict=True))
        count = outputs[0].shape[-2]
        rows: Any = LazyRows(own_rows(hidden), count, self._parallel, ready, True)  # pyright: ignore[reportCallIssue]
        if args:
            args = (rows, *args[1:])
        else:
            kwargs[self._hidden] = rows
        put_off = PutOff(self._parallel.axes.number) if self._parallel.attention else nullcontext()
        with of_this_rank(self._parallel, rows.device, self.training and _dropout_of(self) > 0), put_off:
            out = super().forward(*args, **kwargs)
        if isinstance(put_off, PutOff):
            unseen = [] if put_off.count else ["the model does not call torch's scaled_dot_product_attention"]
            self._tell(put_off.refusals or unseen)
        return out

    def _tell(self, refusals: Sequence[str]) -> None:
        """Says once that attention is not cut by queries although it was asked for, or raises where strict."""
        for refusal in refusals:
            asked = f"as attention={self._parallel.attention!r} asks"
            text = f"{self._path}: attention is not cut by queries, {asked}: {refusal}"
            if self._parallel.overlap.strict:
                raise RuntimeError(text)
            if refusal not in self._told:
                self._told.add(refusal)
                warnings.warn(text, stacklevel=2)


class ParallelAttention(Style):
    """Attention whose heads are spread over the ranks: q, k and v by columns, the output projection by rows.

    Other modules with parameters below it (norms of single heads) see the own heads: they stay whole, and their
    gradients are summed over the ranks.

    Args:
        q: name of the query projection below the module.
        k: of the key projection.
        v: of the value projection.
        out: of the output projection.
        qkv: of one projection that holds the three side by side, in place of q, k and v.
        heads: number of query heads; None reads it from the module or its config.
        kv_heads: number of key/value heads; None likewise, or as many as query heads.
        hidden: name of the argument that holds the hidden states, where it is not passed by position.
    """

    def __init__(
        self,
        q: str = "q_proj",
        k: str = "k_proj",
        v: str = "v_proj",
        out: str = "o_proj",
        *,
        qkv: str | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        hidden: str = "hidden_states",
    ) -> None:
        self.columns = (q, k, v) if qkv is None else (qkv,)
        self.out, self.heads, self.kv_heads, self.hidden = out, heads, kv_heads, hidden

    def placements(self, module: nn.Module, name: str, parallel: Parallel) -> dict[str, Any]:
        heads = self._heads(module, parallel)
        found: dict[str, Any] = {}
        for column, linear in zip(self.columns, submodules(module, self.columns), strict=True):
            parts, rows = self._parts(column, heads)
            placed = column_placements(linear, parallel, parts, rows)
            found |= {f"{column}.{each}": where for each, where in placed.items()}
        (out,) = submodules(module, [self.out])
        placed = RowParallel().placements(out, self.out, parallel)
        found |= {f"{self.out}.{each}": where for each, where in placed.items()}
        for child, other in self._others(module):
            for each, parameter in other.named_parameters():
                if parameter.numel() != heads.features:
                    raise ValueError(
                        f"{child}.{each} {tuple(parameter.shape)} is not of one head of {heads.features} features, "
                        "and this style does not know what it does"
                    )
            found |= replicated(other, f"{child}.")
        return found

    def apply(self, module: nn.Module, parallel: Parallel) -> None:
        heads = self._heads(module, parallel)
        for column, linear in zip(self.columns, submodules(module, self.columns), strict=True):
            become_column(linear, parallel, self._parts(column, heads)[1])
        out = module.get_submodule(self.out)
        if parallel.up is None:
            RowParallel().apply(out, parallel)
        else:
            become_heads_row(out, parallel, heads.features_of(0), transposed=is_transposed(out))
        for _, other in self._others(module):
            become_whole(other, parallel, summed=True)
        self._tell_sizes(module, heads)
        if not parallel.sequence_parallel:
            same_dropout(module, parallel)
        become(
            module,
            Attention,
            parallel,
            _columns=self.columns,
            _hidden=self.hidden,
            _shares=[heads.features_of(0), heads.features_of(1), heads.features_of(1)],
            _told=set(),
        )

    def _heads(self, module: nn.Module, parallel: Parallel) -> HeadShare:
        config = getattr(module, "config", None)
        query = self.heads or _first(module, _HEADS) or _first(config, _HEADS)
        if query is None:
            raise ValueError("the number of heads is neither in the module nor in its config; give heads=")
        groups = self.kv_heads or _first(module, _KV_HEADS) or _first(config, _KV_HEADS) or query
        (out,) = submodules(module, [self.out])
        weight: Any = out.weight
        inputs = weight.shape[0 if is_transposed(out) else 1]
        if inputs % query:
            raise ValueError(f"{self.out} takes {inputs} features, which are not those of {query} heads")
        return HeadShare(query, groups, inputs // query, parallel)

    def _parts(self, column: str, heads: HeadShare) -> tuple[tuple[int, ...], list[range | None]]:
        query, key_value = heads.query * heads.features, heads.key_value * heads.features
        if len(self.columns) == 1:
            return (query, key_value, key_value), [None, heads.key_value_rows, heads.key_value_rows]
        if column == self.columns[0]:
            return (query,), [None]
        return (key_value,), [heads.key_value_rows]

    def _others(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """Children that have parameters and are no projection."""
        known = {*self.columns, self.out}
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own:
            raise ValueError(f"this style does not know what the parameters {', '.join(own)} are for")
        return [(n, child) for n, child in module.named_children() if n not in known and list(child.parameters())]

    def _tell_sizes(self, module: nn.Module, heads: HeadShare) -> None:
        """The module's own code is to reckon with the heads that are here."""
        local = {
            **dict.fromkeys(_HEADS, heads.own_query),
            **dict.fromkeys(_KV_HEADS, heads.own_key_value),
            **dict.fromkeys(_GROUPS, heads.own_query // heads.own_key_value),
            "split_size": heads.own_query * heads.features,
        }
        for name, size in local.items():
            if isinstance(vars(module).get(name), int):
                setattr(module, name, size)


def _first(owner: object, names: Sequence[str]) -> int | None:
    """The first of these attributes that is there."""
    return next((value for name in names if isinstance(value := getattr(owner, name, None), int)), None)


def _dropout_of(module: nn.Module) -> float:
    """The largest probability with which something is dropped in a module."""
    own = getattr(module, "attention_dropout", 0.0)
    inner = [child.p for child in module.modules() if isinstance(child, nn.Dropout)]
    return max([own if isinstance(own, int | float) else 0.0, *inner])
