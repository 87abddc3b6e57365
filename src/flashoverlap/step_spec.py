"""What a data-parallel step should do: layer by layer, what its gathers and its reductions should."""

from __future__ import annotations

from collections import defaultdict

from .flow import BLOCK
from .schedule import Schedule
from .spec import Spec, Terms, Value


def step_spec(schedule: Schedule, terms: Terms) -> Spec:
    """The values that every rank of a step begins and must end with.

    Every rank computes all of a layer's forward, ``y = mm(x)``, and of its input gradient, ``d = dgrad(u)``; piece j of
    a weight lies on rank j at first where parameters are sharded. Piece j of a gradient is the sum over ranks of
    ``wgrad(h_j)``, on rank j, or on all ranks where nothing is sharded.
    """
    n, shard = schedule.ranks, schedule.op.rpartition("_")[2]
    inputs: list[dict[str, Value]] = [{} for _ in range(n)]
    outputs: list[dict[str, Value]] = [{} for _ in range(n)]
    pieces: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for name, _ in schedule.sizes:
        match = BLOCK.match(name)
        if match is not None:
            pieces[match[1]].append((name[len(match[1]) :], int(match[3])))
        elif name[0] == "u":  # replicated: what the input gradient needs is local
            for rank in range(n):
                inputs[rank][name] = terms(name, rank)
                outputs[rank]["d" + name[1:]] = terms("dgrad", rank, (inputs[rank][name],))
    for letter, result, kernel in (("x", "y", "mm"), ("u", "d", "dgrad")):
        for piece, owner in pieces[letter]:
            for rank in range(n):
                held = terms(letter + piece, owner if shard != "none" else rank)
                if rank == owner or shard == "none":
                    inputs[rank][letter + piece] = held
                outputs[rank][result + piece] = terms(kernel, rank, (held,))
    for piece, owner in pieces["h"]:
        for rank in range(n):
            inputs[rank]["h" + piece] = terms("h" + piece, rank)
        of_rank = [terms("wgrad", rank, (terms("h" + piece, rank),)) for rank in range(n)]
        total = tuple(sorted(number for value in of_rank for number in value))
        for rank in range(n) if shard == "none" else (owner,):
            outputs[rank]["z" + piece] = total
    return Spec(inputs, outputs, {})
