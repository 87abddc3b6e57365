"""The MLP table of arXiv 2604.24013, reproduced from two of its figures by simulating the schedules themselves.

What goes in: the sizes, the seconds of communication, and the share of the latency that is gained when all of it is
hidden. They fix a link and a kernel. Everything else comes out of the simulator, on the schedules that calls run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from ..machine import Kernel, Link, Machine
from ..patterns import mlp
from ..simulate import simulate
from .published import PUBLISHED

_SPLITS = (1, 2, 4, 8)
_SLICES = tuple(range(2, 17))
_ASSUMED = PUBLISHED["ascend-910b"].assumed


@dataclass(frozen=True)
class Setting:
    """What is put in.

    Args:
        hidden, ranks, batch, seq: sizes of the MLP's input, and its tensor parallelism.
        itemsize: bytes of an element.
        communication_s: seconds that one all-gather and one reduce-scatter take together.
        hidden_reduction: share of the vanilla latency that is gained when all communication is hidden.
        slice_reduction: share of the communication that slicing hides; chooses the number of slices, nothing else.
        latency_s, issue_s: of a transfer, and of issuing one operation. Assumptions, those of the Ascend 910B.
    """

    hidden: int = 4096
    ranks: int = 4
    batch: int = 32
    seq: int = 4096
    itemsize: int = 2
    communication_s: float = 43.8e-3
    hidden_reduction: float = 0.369
    slice_reduction: float = 0.84
    latency_s: float = _ASSUMED.latency_s
    issue_s: float = _ASSUMED.issue_s

    @property
    def piece_rows(self) -> int:
        """Rows that each rank owns."""
        return self.batch * self.seq // self.ranks

    @property
    def compute_s(self) -> float:
        """Seconds of the vanilla latency that are not communication."""
        return self.communication_s * (1 / self.hidden_reduction - 1)

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.itemsize


class Row(NamedTuple):
    """One mode: what of its latency is exposed communication, and what it gains over the vanilla one."""

    mode: str
    detail: str
    communication_ms: float
    latency_ms: float
    communication_reduction: float
    latency_reduction: float


class Reproduction(NamedTuple):
    """Everything that comes out, beside what was put in.

    ``slice_counts`` holds, for every number of slices, the share of the communication that it hides; ``trend`` the rows
    of other sequence lengths on the same machine.
    """

    setting: Setting
    machine: Machine
    rows: list[Row]
    slices: int
    slice_counts: dict[int, float]
    trend: dict[int, list[Row]]

    def as_json(self) -> dict[str, Any]:
        """All of it in plain types."""
        kernel, link = self.machine.kernel("up"), self.machine.link
        return {
            "rows": [row._asdict() for row in self.rows],
            "inputs": asdict(self.setting),
            "derived": {
                "link_bytes_per_s": link.bytes_per_s,
                "matmul_seconds_per_row": kernel.seconds_per_row,
                "slices": self.slices,
            },
            "slice_counts": {str(count): share for count, share in self.slice_counts.items()},
            "trend": {str(seq): [row._asdict() for row in rows] for seq, rows in self.trend.items()},
        }


def machine_of(setting: Setting) -> Machine:
    """The machine on which the vanilla run takes what ``setting`` says.

    Of its four operations (a gather, two matmuls, a scatter) the first matmul is issued while the gather flies.

    Raises:
        ValueError: the figures leave no time for the bytes, or none for the matmuls.
    """
    rounds = 2 * (setting.ranks - 1)
    wire_s = setting.communication_s - rounds * setting.latency_s
    matmuls_s = setting.compute_s - 3 * setting.issue_s
    if wire_s <= 0 or matmuls_s <= 0:
        raise ValueError(f"{setting} leaves {wire_s:.2g} s for bytes and {matmuls_s:.2g} s for matmuls")
    rows = setting.ranks * setting.piece_rows
    matmul = Kernel(seconds_per_row=matmuls_s / 2 / rows)  # both matmuls have equally much to do
    link = Link(setting.latency_s, rounds * setting.piece_rows * setting.row_bytes / wire_s)
    return Machine(link, {"up": matmul, "down": matmul}, issue_s=setting.issue_s)


def reproduce(setting: Setting | None = None, seqs: Sequence[int] = (1024, 2048, 4096, 8192, 16384)) -> Reproduction:
    """Simulates the vanilla run, slicing, and the decomposed schedule."""
    setting = setting or Setting()
    machine = machine_of(setting)
    counts = {count: _reductions(setting, machine, "sliced", count)[0] for count in _SLICES}
    slices = min(counts, key=lambda count: abs(counts[count] - setting.slice_reduction))
    splits = max(_SPLITS, key=lambda split: _reductions(setting, machine, "direct", split))

    trend = {seq: _rows(replace(setting, seq=seq), machine, slices, splits) for seq in seqs}
    return Reproduction(setting, machine, _rows(setting, machine, slices, splits), slices, counts, trend)


def _rows(setting: Setting, machine: Machine, slices: int, splits: int) -> list[Row]:
    return [
        _row(setting, machine, "vanilla", "collective", 1),
        _row(setting, machine, "slice", "sliced", slices),
        _row(setting, machine, "flash", "direct", splits),
    ]


def _row(setting: Setting, machine: Machine, mode: str, pattern: str, splits: int) -> Row:
    vanilla_s = _seconds(setting, machine, "collective", 1)
    latency_s = _seconds(setting, machine, pattern, splits)
    compute_s = vanilla_s - _communication_s(setting, machine)
    hidden, gained = _reductions(setting, machine, pattern, splits)
    return Row(mode, f"{pattern} x{splits}", (latency_s - compute_s) * 1e3, latency_s * 1e3, hidden, gained)


def _reductions(setting: Setting, machine: Machine, pattern: str, splits: int) -> tuple[float, float]:
    """Shares of the vanilla run's communication, and of its latency, that are gained."""
    vanilla_s = _seconds(setting, machine, "collective", 1)
    gained_s = vanilla_s - _seconds(setting, machine, pattern, splits)
    return gained_s / _communication_s(setting, machine), gained_s / vanilla_s


def _communication_s(setting: Setting, machine: Machine) -> float:
    """Seconds of the two collectives."""
    rounds = setting.ranks - 1
    return 2 * machine.collective_s(rounds, rounds * setting.piece_rows * setting.row_bytes)


def _seconds(setting: Setting, machine: Machine, pattern: str, splits: int) -> float:
    rows = [setting.piece_rows] * setting.ranks
    widths = {"x": setting.row_bytes, "p": setting.row_bytes}
    schedule = mlp(rows, pattern=pattern, splits=splits, row_bytes=widths)
    return simulate(schedule, machine, spans=False).makespan_s
