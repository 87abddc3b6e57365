"""One way to cut a call into pieces: along its rows, or along the features of its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .alike import alike_after
from .all_to_all import all_to_all
from .candidate import Candidate
from .costs import ComputeCosts
from .flow import ALL_TO_ALLS, flow_of
from .machine import Kernel, Machine
from .overlap import Overlap
from .patterns import build, split_sizes
from .schedule import Compute, Exchange, Schedule
from .wire_bound import least_seconds_in_parts, least_wire_seconds, message_seconds
from .workload import Workload, along_features, layers_of, workload

FEW_ROWS = 256  # of a piece: matmuls of fewer lose efficiency, so that features may be the better thing to cut
_WHOLE_ROWS = 64  # rows of a piece from which on pieces may be taken as equal, which is off by one row each
_MOST_UNALIKE = 8  # ranks; of more, which take too long to replay one by one, pieces of fewer rows are as well
DIRECT = Candidate("flash", "direct", 1)


@dataclass(frozen=True)
class Cut:
    """Pieces of one kind, and a machine that has the kernels of the call.

    Args:
        work: the call; where it is cut along features, a "row" is a feature.
        pieces: rows of each rank's piece, or features.
        machine: with the call's kernels.
        itemsize: bytes of a value.
        accumulated: bytes of a value of a sum.
        along: "rows" or "features".
        layers: of the call, if it can also be run as these, one after the other.
    """

    work: Workload
    pieces: tuple[int, ...]
    machine: Machine
    itemsize: int
    accumulated: int
    along: str = "rows"
    layers: tuple[Cut, ...] = ()

    def row_bytes(self, candidate: Candidate) -> tuple[tuple[str, int], ...]:
        """Bytes of a row by letter; where what is sent is a sum already, partial sums are as wide as those."""
        travels = self.accumulated if candidate.pattern in ("ring", "collective") else self.itemsize
        return tuple(sorted(self.work.row_bytes(self.itemsize, travels).items()))

    def schedule(self, candidate: Candidate) -> Schedule:
        """The schedule of a candidate."""
        return schedule(self.work.flow, self.pieces, self.row_bytes(candidate), self.work.tensors, candidate)

    def orders(self, overlap: Overlap) -> list[tuple[str, int]]:
        """Patterns, and over how many nodes their rounds are spread, that may hide communication."""
        sizes, pattern = self.machine.nodes, overlap.pattern
        orders: list[tuple[str, int]] = [("direct", 1)] if pattern == "direct" else []
        blocks = flow_of(self.work.flow).swap is not None
        if orders and self.machine.uplink is not None and len(set(sizes)) == 1 and 1 < len(sizes) < len(self.pieces):
            spread = ("direct", len(sizes))
            orders = [spread] if blocks else [*orders, spread]  # blocks go from end to end, in whatever order
        # an all-to-all sends every block once, and round a ring each as far as it has to go
        if pattern == "ring" or (overlap.mode == "auto" and not blocks):
            orders.append(("ring", 1))
        return orders

    def compute_s(self) -> float:
        """Seconds of the kernels, unsplit."""
        whole = self.schedule(Candidate("collective", "collective", 1))
        costs = ComputeCosts(whole, self.machine)
        return sum(costs.kernel_seconds(op) for op in whole.programs[0] if isinstance(op, Compute) and op.kernel)

    def messages(self) -> int:
        """Exchanges that have to be replayed where pieces are not cut any further."""
        direct = self.schedule(DIRECT)
        return alike_after(direct, self.machine) * sum(isinstance(op, Exchange) for op in direct.programs[0])

    def wire_s(self) -> float:
        """Seconds of the busiest wire at its bandwidth."""
        return least_wire_seconds(self.schedule(DIRECT), self.machine)

    def least_s(self, parts: int, compute_s: float) -> float:
        """Seconds that a rank needs at the least with so many parts of each piece."""
        return least_seconds_in_parts(self.schedule(DIRECT), self.machine, parts, compute_s)


def schedule(
    flow: str, pieces: tuple[int, ...], row_bytes: tuple[tuple[str, int], ...], tensors: int, candidate: Candidate
) -> Schedule:
    """What a candidate runs."""
    _, pattern, splits, nodes, *_ = candidate
    if flow_of(flow).swap is None:
        return build(flow, pieces, pattern=pattern, splits=splits, row_bytes=dict(row_bytes), nodes=nodes)
    # where blocks are summed they are the target's rows, else the source's
    summed = ALL_TO_ALLS[flow.partition("-")[0]].reduce
    blocks = [pieces] * len(pieces) if summed else [[own] * len(pieces) for own in pieces]
    widths = dict(row_bytes)
    return all_to_all(blocks, op=flow, pattern=pattern, splits=splits, tensors=tensors, row_bytes=widths, nodes=nodes)


def cuts_of(
    op: str,
    sizes: Mapping[str, int | Sequence[int]],
    total: int,
    ranks: int,
    machine: Machine,
    itemsizes: Sequence[int],
) -> list[Cut]:
    """The ways to cut a call of ``total`` rows: along its rows, and where these are few also along features.

    ``itemsizes`` are the bytes of a value, and of a value of a sum.
    """
    work, rows = workload(op, sizes, ranks), _pieces(total, ranks)
    itemsize, accumulated = itemsizes

    def of(work: Workload, on: Machine, layers: tuple[Cut, ...] = ()) -> Cut:
        return Cut(work, rows, work.on(on, sum(rows), itemsize), itemsize, accumulated, layers=layers)

    # not where kernels have costs by name, of the whole call, nor where all ranks' programs have to be replayed
    whole = machine.matmul is None or machine.kernels or machine.uplink or machine.links or ranks == 1
    later = replace(machine, link=replace(machine.link, burst_bytes=0))  # which the first layer has used up
    layers = [] if whole else [of(layer, later if at else machine) for at, layer in enumerate(layers_of(work))]
    cut = of(work, machine, tuple(layers))
    # kernels and additions that a machine has by name cost what they do for a row
    told = machine.matmul is None or machine.add != Kernel() or set(machine.kernels) & set(work.kernels)
    turned = along_features(op, sizes, sum(rows)) if 0 < max(rows) < FEW_ROWS and ranks > 1 and not told else None
    if turned is None:
        return [cut]
    count, work = turned
    pieces = _pieces(count, ranks)
    features = Cut(work, pieces, work.on(machine, sum(pieces), itemsize), itemsize, accumulated, "features")
    # what goes out and back is waited for twice, split or not: where that is more than what can be hidden, nothing is
    # won that a prediction could be sure of
    links = (machine.link, *machine.links, *filter(None, [machine.uplink]))
    told_s = max(link.latency_s for link in links) + machine.notice_s
    hidden_s = min(cut.compute_s(), message_seconds(features.schedule(DIRECT), machine))
    return [cut, features] if hidden_s > 4 * told_s else [cut]


def _pieces(total: int, ranks: int) -> tuple[int, ...]:
    """Rows of each piece, taken as equal where that is off by little: ranks are then alike, and quickly simulated."""
    rows = split_sizes(total, ranks)
    return tuple(rows) if rows[0] < _WHOLE_ROWS and ranks <= _MOST_UNALIKE else (rows[0],) * ranks
