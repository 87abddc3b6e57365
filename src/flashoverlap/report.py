"""What every call site asked for, what it got, and why: the report that is never silent."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace


@dataclass
class Record:
    """One call site's account.

    ``bytes`` are what this rank sent (in mode "collective" the least that it had to), ``blocked_s`` the seconds that
    its program stood waiting for a piece, ``calls`` how often it ran; ``reason`` says in a sentence what the code
    ``reason_code`` stands for. ``seconds`` are what its schedules took, kernels among them; ``predicted_s`` what plans
    said of that, and ``predicted_exposed_s`` what they said that communication would add; None where none was planned.
    """

    site: str
    op: str
    mode_asked: str
    mode_taken: str
    reason_code: str
    reason: str
    detail: str = ""
    calls: int = 0
    bytes: int = 0
    blocked_s: float = 0.0
    seconds: float = 0.0
    predicted_s: float | None = None
    predicted_exposed_s: float | None = None

    @property
    def taken(self) -> str:
        """What was run, in words."""
        return f"{self.mode_taken} {self.detail}".rstrip()

    @property
    def outcome(self) -> tuple[str, ...]:
        """What calls of one call site must share to be one record."""
        return self.op, self.mode_asked, self.mode_taken, self.reason_code, self.detail


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole component of a module's path


@dataclass
class Report:
    """Records by call site, and notes of what happened meanwhile; prints as a table."""

    _records: dict[tuple[str, ...], Record] = field(default_factory=dict)
    _notes: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @staticmethod
    def of(records: Iterable[Record], notes: Iterable[str] = ()) -> Report:
        """A report of copies of these records, those of one call site added up, and of these notes."""
        made = Report()
        for record in records:
            made.add(replace(record))
        for note in notes:
            made.note(note)
        return made

    def by_layer(self) -> Report:
        """A report in which call sites that differ in numbers only, as those of layers do, are added up as one.

        It is named ``layers.*.mlp``. A call site that no other has the outcome of keeps its name.
        """
        alike: dict[tuple[str, ...], list[Record]] = {}
        for record in self.records:
            alike.setdefault((_NUMBER.sub("*", record.site), *record.outcome), []).append(record)
        named = ((site if len(records) > 1 else records[0].site, records) for (site, *_), records in alike.items())
        return Report.of((replace(record, site=site) for site, records in named for record in records), self.notes)

    def add(self, record: Record) -> None:
        """Adds one call to its call site's record."""
        with self._lock:
            kept = self._records.setdefault((record.site, *record.outcome), record)
            if kept is not record:
                kept.calls += record.calls
                kept.bytes += record.bytes
                kept.blocked_s += record.blocked_s
                kept.seconds += record.seconds
                kept.predicted_s = _sum(kept.predicted_s, record.predicted_s)
                kept.predicted_exposed_s = _sum(kept.predicted_exposed_s, record.predicted_exposed_s)

    def note(self, text: str) -> None:
        """Notes what happened once, as that calls are planned anew from here on."""
        with self._lock:
            self._notes.append(text)

    def clear(self) -> None:
        """Forgets all records and notes."""
        with self._lock:
            self._records.clear()
            self._notes.clear()

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes, in the order of their making."""
        with self._lock:
            return tuple(self._notes)

    @property
    def records(self) -> tuple[Record, ...]:
        """The records, in the order in which their call sites were first met."""
        with self._lock:
            return tuple(self._records.values())

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        return self.records[index]

    def __str__(self) -> str:
        head = ("call site", "operator", "asked", "taken", "calls", "MB sent", "ms", "predicted", "blocked ms", "why")
        rows = [
            (
                r.site,
                r.op,
                r.mode_asked,
                r.taken,
                str(r.calls),
                f"{r.bytes / 1e6:.1f}",
                f"{r.seconds * 1e3:.1f}",
                "-" if r.predicted_s is None else f"{r.predicted_s * 1e3:.1f}",
                f"{r.blocked_s * 1e3:.1f}",
                f"{r.reason_code}: {r.reason}",
            )
            for r in self.records
        ]
        width = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, width, strict=True)).rstrip() for row in (head, *rows)]
        return "\n".join([*lines, *self.notes])


def _sum(first: float | None, second: float | None) -> float | None:
    """The sum of what all calls have; None where one has none."""
    return None if first is None or second is None else first + second


_place: ContextVar[str] = ContextVar("place", default="")


@contextmanager
def placed(name: str) -> Iterator[None]:
    """Within, calls are entered under this name: the path of the module that they belong to."""
    token = _place.set(name)
    try:
        yield
    finally:
        _place.reset(token)


def place() -> str:
    """The module that a call belongs to; "" outside of one."""
    return _place.get()


def call_site() -> str:
    """Where a call belongs: the module that makes it, or ``file.py:line`` of the nearest caller outside this package
    and outside torch."""
    if _place.get():
        return _place.get()
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("flashoverlap.", "torch.")):
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"
