"""What a schedule should do: the values that every rank of it begins and must end with, as its flow says.

Values are multisets of terms. A term is an atom (``h1@2``: piece ``h1`` as rank 2 holds it at first) or a kernel of one
rank applied to values (``mm@2(h1@2)``); equal terms have equal numbers, so that comparing values is cheap.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .flow import BLOCK, PIECE, Flow, flow_of
from .schedule import Schedule, ScheduleError

Value = tuple[int, ...]  # numbers of its terms in ascending order


class Terms:
    """Numbers terms, the same term always alike, and prints them."""

    def __init__(self) -> None:
        self._number: dict[tuple[str, int, tuple[Value, ...] | None], int] = {}
        self._terms: list[tuple[str, int, tuple[Value, ...] | None]] = []

    def __call__(self, what: str, rank: int, arguments: Iterable[Value] | None = None) -> Value:
        """The value of kernel ``what`` of ``rank`` on ``arguments``, in any order; of an atom where there are none."""
        key = (what, rank, None if arguments is None else tuple(sorted(arguments)))
        number = self._number.setdefault(key, len(self._terms))
        if number == len(self._terms):
            self._terms.append(key)
        return (number,)

    def text(self, value: Iterable[int]) -> str:
        return " + ".join(self._text(number) for number in value)

    def _text(self, number: int) -> str:
        what, rank, arguments = self._terms[number]
        return f"{what}@{rank}" + ("" if arguments is None else f"({', '.join(map(self.text, arguments))})")


@dataclass(frozen=True)
class Spec:
    """Per rank the values that it begins and must end with; ``needs[w]`` is read by the kernel that writes ``w`` though
    the schedule does not say so (a weight gradient's local side)."""

    inputs: list[dict[str, Value]]
    outputs: list[dict[str, Value]]
    needs: Mapping[str, tuple[str, ...]]


def spec_of(schedule: Schedule, terms: Terms) -> Spec:
    """What the programs of ``schedule`` are to do together, in numbers of ``terms``.

    Raises:
        ScheduleError: no flow describes the operator, or the sizes do not say how a piece is split.
    """
    if schedule.op.startswith("data_parallel_step"):
        from .step_spec import step_spec  # late: it is made of what this module defines

        return step_spec(schedule, terms)
    try:
        flow = flow_of(schedule.op)
    except ValueError as error:
        raise ScheduleError(f"cannot verify {schedule.op!r}: {error}") from None
    return (_piece_spec if flow.swap is None else _block_spec)(flow, schedule, terms)


def _piece_spec(flow: Flow, schedule: Schedule, terms: Terms) -> Spec:
    n = schedule.ranks
    parts = {letter: _parts(schedule, PIECE, letter, map(str, range(n))) for letter in (flow.letters[0], flow.extra)}
    flat = {letter: [(part, int(owner)) for owner, of in parts[letter].items() for part in of] for letter in parts}
    inputs = [
        {
            letter + part: terms(letter + part, rank)
            for letter in parts
            for part, owner in flat[letter]
            if owner == rank or not (flow.gather or letter == flow.extra)
        }
        for rank in range(n)
    ]
    outputs = [_wgrad_outputs(flow, terms, rank, flat) for rank in range(n)]
    for part, owner in flat[flow.letters[0]] if flow.output else ():
        of_rank = [_through(flow, terms, rank, part, owner) for rank in range(n)]
        total = tuple(sorted(number for value in of_rank for number in value)) if flow.reduce else ()
        for rank in range(n) if flow.reduce != "reduce_scatter" else (owner,):
            outputs[rank][flow.output + part] = total or of_rank[rank]
    first = [part for part, _ in flat[flow.letters[0]]]
    needs = {
        w.write: tuple(flow.letters[w.after] + part for part in first)
        for w in flow.wgrads
        if w.reads != flow.letters[w.after]
    }
    return Spec(inputs, outputs, needs)


def _through(flow: Flow, terms: Terms, rank: int, part: str, owner: int) -> Value:
    """Piece ``part`` as it is at first, taken through all kernels of ``rank``."""
    value = terms(flow.letters[0] + part, owner if flow.gather else rank)
    for kernel in flow.kernels:
        value = terms(kernel, rank, (value,))
    return value


def _wgrad_outputs(flow: Flow, terms: Terms, rank: int, flat: Mapping[str, list[tuple[str, int]]]) -> dict[str, Value]:
    outputs: dict[str, Value] = {}
    for w in flow.wgrads:
        spread = flow.gather or w.reads == flow.extra
        pieces = flat[w.reads] if w.reads else ()
        reads = [terms(w.reads + part, owner if spread else rank) for part, owner in pieces]
        outputs[w.write] = terms(w.kernel, rank, reads)
    return outputs


def _block_spec(flow: Flow, schedule: Schedule, terms: Terms) -> Spec:
    n, first = schedule.ranks, flow.letters[0]
    owners = [f"{source}_{target}" for source in range(n) for target in range(n)]
    found = {match[1] for name, _ in schedule.sizes if (match := BLOCK.match(name)) and match[1][0] == first}
    inputs: list[dict[str, Value]] = [{} for _ in range(n)]
    made: list[dict[str, list[Value]]] = [{} for _ in range(n)]  # by rank and name, the terms of a sum
    for letter in found | {first}:
        tensor = letter[1:]  # of several
        for owner, of in _parts(schedule, BLOCK, letter, owners).items():
            source, target = map(int, owner.split("_"))
            for part in of:
                values = _block_values(flow, terms, letter + part, source, target)
                inputs[source][letter + part] = values[0]
                if flow.output:
                    summed = f"{target}{part[len(owner) :]}" if flow.reduce else tensor + part
                    made[target].setdefault(flow.output + summed, []).append(values[-1])
                for w in (w for w in flow.wgrads if w.reads):
                    read = values[flow.letters.index(w.reads)]
                    made[target].setdefault(w.write + tensor, []).append(terms(w.kernel, target, (read,)))
    outputs = [{name: tuple(sorted(sum(of, ()))) for name, of in names.items()} for names in made]
    for rank in range(n):
        outputs[rank] |= {w.write: terms(w.kernel, rank, ()) for w in flow.wgrads if not w.reads}
    return Spec(inputs, outputs, {})


def _block_values(flow: Flow, terms: Terms, name: str, source: int, target: int) -> list[Value]:
    """Part of a block as it is at first, and after each kernel."""
    values = [terms(name, source)]
    for index, kernel in enumerate(flow.kernels):
        values.append(terms(kernel, source if index < (flow.swap or 0) else target, (values[-1],)))
    return values


def _parts(schedule: Schedule, form: re.Pattern[str], letter: str, owners: Iterable[str]) -> dict[str, list[str]]:
    """What the sizes say of how the pieces of ``letter`` are split: ``{"0": ["0.0", "0.1"], ...}`` by owner."""
    if not letter:
        return {}
    matches = [form.match(name) for name, _ in schedule.sizes]
    known = {match[0][len(letter) :] for match in matches if match and match[1] == letter}
    splits = Counter(part.partition(".")[0] for part in known)
    parts = {
        owner: [owner] if owner in known else [f"{owner}.{split}" for split in range(splits[owner])] for owner in owners
    }
    listed = {part for of in parts.values() for part in of}
    odd = [letter + part for part in sorted(known ^ listed)] + [letter + owner for owner in parts if not parts[owner]]
    if odd:
        raise ScheduleError(f"{schedule.op} on {schedule.ranks} ranks: the sizes do not say how {odd[0]} is split")
    return parts
