"""What each rank of a decomposed collective does: one program a rank, with no tensor in it.

The sentence that every reader of a schedule implements: *a rank issues its program in order; an exchange is posted and
never blocks; exchanges of a rank leave one after another in program order; a Compute first waits for what it reads.*

Buffers are names. ``x2`` is piece 2 (the rows that rank 2 owns), ``x2.1`` its split 1, and ``p2@0`` piece 2 as it came
from rank 0. A name means the same thing on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

_NAME = r"[A-Za-z_][\w.]*(?:@\d+)?"
_COMPUTE = re.compile(rf"({_NAME}(?:,{_NAME})*)=(?:([A-Za-z_]\w*)\(([^)]*)\)|({_NAME}))((?:\+{_NAME})*)$")
_EXCHANGE = re.compile(rf"xchg ({_NAME})>(\d+) ({_NAME})<(\d+)$")
_SIZE = re.compile(rf"({_NAME})=(\d+)x(\d+)$")
_HEADER = re.compile(r"schedule ([\w-]+) ranks=(\d+)$")
_RANK = re.compile(r"rank (\d+): ?(.*)$")


class Compute(NamedTuple):
    """One kernel call: ``writes = kernel(reads) + adds``.

    With as many writes as reads the kernel maps piece by piece (one call, so that a matmul may take all rows at once);
    with a single write it may join several reads (a weight gradient). ``adds`` are summed onto the result, left to
    right, so that sums are visible to the verifier and a matmul can do them (``beta=1``); with an empty kernel name the
    Compute is the sum of ``adds`` alone. Weights and saved activations are the kernel's own business.
    """

    kernel: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    adds: tuple[str, ...] = ()

    def __str__(self) -> str:
        terms = ([f"{self.kernel}({','.join(self.reads)})"] if self.kernel else []) + list(self.adds)
        return f"{','.join(self.writes)}={'+'.join(terms)}"


class Exchange(NamedTuple):
    """One round of point-to-point traffic: ``send`` goes to rank ``to`` while ``recv`` comes from rank ``frm``."""

    send: str
    to: int
    recv: str
    frm: int

    def __str__(self) -> str:
        return f"xchg {self.send}>{self.to} {self.recv}<{self.frm}"


class Collective(NamedTuple):
    """One whole collective of the group, the form that baselines and fall-backs take."""

    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} {' '.join(self.reads)} -> {' '.join(self.writes)}"


Op = Compute | Exchange | Collective
Program = tuple[Op, ...]


class Programs(Sequence[Program]):
    """The programs of a pattern, each made when it is first asked for: a rank that runs its own needs no other's.

    Args:
        make: makes the program of a rank, the same whenever it is asked.
        ranks: how many there are.
        period: the program of rank ``r + period`` is that of rank ``r`` with ``period`` added to every rank and to the
            owner of every piece, modulo ``ranks``, but for the order of a sum; and both pieces have one size. ``ranks``
            where nothing repeats.
    """

    def __init__(self, make: Callable[[int], Iterable[Op]], ranks: int, period: int) -> None:
        self._make, self._ranks, self.period = make, ranks, period
        self._made: dict[int, Program] = {}

    def __len__(self) -> int:
        return self._ranks

    @overload
    def __getitem__(self, index: int) -> Program: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Program, ...]: ...
    def __getitem__(self, index: int | slice) -> Program | tuple[Program, ...]:
        rank = range(self._ranks)[index]
        if isinstance(rank, range):
            return tuple(self[each] for each in rank)
        program = self._made.get(rank)
        if program is None:
            program = self._made[rank] = tuple(self._make(rank))
        return program

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, tuple | Programs) and tuple(self) == tuple(other))

    def __hash__(self) -> int:
        return hash(tuple(self))


class Size(NamedTuple):
    """How large a buffer is: ``rows`` of ``row_bytes`` bytes each."""

    rows: int
    row_bytes: int

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes


class Sizes(Sequence[tuple[str, Size]]):
    """The sizes of a pattern of many buffers, each told when it is asked for: a rank knows few of them.

    Args:
        names: makes all names, the same whenever it is asked.
        size_of: the size by a name; None for a name that is none.
    """

    def __init__(self, names: Callable[[], Iterable[str]], size_of: Callable[[str], Size | None]) -> None:
        self._names, self._size_of = names, size_of
        self._known: dict[str, Size | None] = {}

    @cached_property
    def _all(self) -> tuple[tuple[str, Size], ...]:
        named = ((name, self.get(name)) for name in self._names())
        return tuple((name, size) for name, size in named if size is not None)

    def get(self, name: str) -> Size | None:
        """The size of a buffer, as of a mapping."""
        if name not in self._known:
            self._known[name] = self._size_of(name)
        return self._known[name]

    def __len__(self) -> int:
        return len(self._all)

    @overload
    def __getitem__(self, index: int) -> tuple[str, Size]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[str, Size], ...]: ...
    def __getitem__(self, index: int | slice) -> tuple[str, Size] | tuple[tuple[str, Size], ...]:
        return self._all[index]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, tuple | Sizes) and self._all == tuple(other))

    def __hash__(self) -> int:
        return hash(self._all)


class ScheduleError(ValueError):
    """A schedule that cannot be read or cannot be right; the message shows the programs with the place marked."""

    def __init__(self, message: str, schedule: Schedule | None = None, rank: int = -1, index: int = -1) -> None:
        self.rank, self.index = rank, index
        super().__init__(message if schedule is None else f"{message}\n{_marked(schedule, rank, index)}")


@dataclass(frozen=True)
class Schedule:
    """One program a rank, and the size of every buffer in them.

    Args:
        op: what the programs compute together; names the specification that :func:`flashoverlap.verify` holds them to.
        programs: ``programs[rank]`` is that rank's operations in order; a tuple, or made when they are asked for.
        sizes: ``(name, size)`` of every buffer, a tuple, or told when they are asked for; a name with a source
            (``p2@0``) falls back to the one without.
    """

    op: str
    programs: Sequence[Program]
    sizes: Sequence[tuple[str, Size]]

    @property
    def ranks(self) -> int:
        return len(self.programs)

    @cached_property
    def _size_of(self) -> Callable[[str], Size | None]:
        return self.sizes.get if isinstance(self.sizes, Sizes) else dict(self.sizes).get

    def __getstate__(self) -> dict[str, object]:
        return {"op": self.op, "programs": tuple(self.programs), "sizes": tuple(self.sizes)}

    def size(self, name: str) -> Size:
        """The size of buffer ``name``; raises ScheduleError for a name that the schedule does not know."""
        found = self._size_of(name) or self._size_of(name.partition("@")[0])
        if found is None:
            raise ScheduleError(f"buffer {name!r} of {self.op} has no size")
        return found

    def wire_bytes(self, rank: int) -> int:
        """Bytes that ``rank`` sends in exchanges (collectives not counted: a backend moves them as it likes)."""
        return sum(self.size(op.send).bytes for op in self.programs[rank] if isinstance(op, Exchange))

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size.rows}x{size.row_bytes}" for name, size in self.sizes)
        lines = [f"schedule {self.op} ranks={self.ranks}", f"size {sizes}".rstrip()]
        return "\n".join(lines + [f"rank {rank}: {_line(program)}" for rank, program in enumerate(self.programs)])

    @staticmethod
    def parse(text: str) -> Schedule:
        """Reads back what ``str(schedule)`` printed.

        Raises:
            ScheduleError: the text is not of that form; the message quotes the place.
        """
        lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
        header = _HEADER.match(lines[0]) if lines else None
        if header is None:
            raise ScheduleError(
                f"a schedule begins with 'schedule NAME ranks=N', not with {lines[0] if lines else ''!r}"
            )
        ranks = int(header[2])
        body = lines[1:]
        sizes: list[tuple[str, Size]] = []
        if body and body[0].split()[0] == "size":
            sizes = [_parse_size(word) for word in body.pop(0).split()[1:]]
        if len(body) != ranks:
            raise ScheduleError(f"{ranks} ranks are announced and {len(body)} programs follow")
        return Schedule(header[1], tuple(_parse_rank(line, rank) for rank, line in enumerate(body)), tuple(sizes))

    def grid(self) -> str:
        """Draws the programs as a grid: for each rank what is on the wire above what is computed meanwhile."""
        rows = [_columns(program) for program in self.programs]
        count = max((len(line) for pair in rows for line in pair), default=0)
        cells = [[line + [""] * (count - len(line)) for line in pair] for pair in rows]
        width = [max(len(line[column]) for pair in cells for line in pair) for column in range(count)]
        out: list[str] = []
        for rank, (net, compute) in enumerate(cells):
            for title, line in ((f"rank {rank} net", net), (f"{'':{len(str(rank)) + 5}} mm ", compute)):
                drawn = "".join(f"[{cell:{w}}]" if cell else " " * (w + 2) for cell, w in zip(line, width, strict=True))
                out.append(f"{title} {drawn}".rstrip())
        return "\n".join(out)


def _line(program: Program) -> str:
    return " | ".join(str(op) for op in program)


def _marked(schedule: Schedule, rank: int, index: int, around: int = 4) -> str:
    """The programs near the marked place, the marked operation between ``>>`` and ``<<``."""
    lines: list[str] = []
    for other in range(schedule.ranks) if schedule.ranks <= 8 else (rank,):
        program = schedule.programs[other]
        first, last = (
            (max(0, index - around), index + around + 1) if len(program) > 2 * around + 2 else (0, len(program))
        )
        ops = [
            f">>{op}<<" if (other, at) == (rank, index) else str(op)
            for at, op in enumerate(program)
            if first <= at < last
        ]
        if (other, len(program)) == (rank, index):
            ops.append(">>end<<")
        dots = ("... | " if first else "", " | ..." if last < len(program) else "")
        lines.append(f"{'>' if other == rank else ' '} rank {other}: {dots[0]}{' | '.join(ops)}{dots[1]}")
    return "\n".join(lines)


def _columns(program: Program) -> tuple[list[str], list[str]]:
    """Places a program on a clock of equal steps: an exchange flies beside the step after which it was posted."""
    net: list[str] = []
    compute: list[str] = []
    arrives: dict[str, int] = {}

    def place(line: list[str], column: int, text: str) -> int:
        line.extend([""] * (max(column, len(line)) - len(line)))
        line.append(text)
        return len(line)

    for op in program:
        if isinstance(op, Compute):
            ready = max((arrives.get(name, 0) for name in op.reads + op.adds), default=0)
            place(compute, ready, str(op))
        elif isinstance(op, Exchange):
            ready = max(len(compute), arrives.get(op.send, 0))
            arrives[op.recv] = place(net, ready, f"{op.send}>{op.to} {op.recv}<{op.frm}")
        else:
            done = place(net, len(compute), str(op))
            arrives.update(dict.fromkeys(op.writes, done))
    return net, compute


def _parse_size(word: str) -> tuple[str, Size]:
    match = _SIZE.match(word)
    if match is None:
        raise ScheduleError(f"a size reads NAME=ROWSxBYTES, not {word!r}")
    return match[1], Size(int(match[2]), int(match[3]))


def _parse_rank(line: str, rank: int) -> Program:
    match = _RANK.match(line)
    if match is None or int(match[1]) != rank:
        raise ScheduleError(f"the program of rank {rank} begins with 'rank {rank}:', not with {line[:20]!r}")
    return tuple(_parse_ops(match[2], rank))


def _parse_ops(text: str, rank: int) -> Iterator[Op]:
    for part in (part.strip() for part in text.split("|")):
        if not part:
            continue
        exchange = _EXCHANGE.match(part)
        compute = _COMPUTE.match(part)
        kind, _, rest = part.partition(" ")
        if exchange:
            yield Exchange(exchange[1], int(exchange[2]), exchange[3], int(exchange[4]))
        elif compute:
            adds = tuple(compute[5].split("+")[1:])
            adds = (compute[4], *adds) if compute[4] else adds
            reads = tuple(name for name in (compute[3] or "").split(",") if name)
            yield Compute(compute[2] or "", reads, tuple(compute[1].split(",")), adds)
        elif kind in COLLECTIVES and " -> " in rest:
            reads_text, _, writes_text = rest.partition(" -> ")
            yield Collective(kind, tuple(reads_text.split()), tuple(writes_text.split()))
        else:
            raise ScheduleError(f"rank {rank}: cannot read {part!r}")
