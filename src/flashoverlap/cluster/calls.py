"""What one operator of a step costs on its group, as the planner says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..plan import Candidate, Plan, plan
from .cluster import Cluster
from .operators import Operator, Sizes
from .split import Split


class Call(NamedTuple):
    """One operator of a step, as planned; seconds and bytes are those of one call.

    Args:
        site, phase, op, axis, times: as in :class:`~flashoverlap.cluster.operators.Operator`.
        ranks: of the group.
        mode: what is taken; "" where nothing is moved.
        seconds: of the call; of transfers beside other operators, what they take by themselves.
        compute_s: of its kernels alone.
        exposed_s: by how much communication makes the step longer.
        plain_s: by how much it would, with nothing overlapped.
        bound_s: what no schedule of the call beats: the longer of its kernels and the busiest wire.
        bytes: that a rank sends.
        reason: why this mode.
    """

    site: str
    phase: str
    op: str
    axis: str
    times: int
    ranks: int
    mode: str
    seconds: float
    compute_s: float
    exposed_s: float
    plain_s: float
    bound_s: float
    bytes: int
    reason: str


class Groups:
    """The groups that a device of a split cluster belongs to."""

    def __init__(self, cluster: Cluster, split: Split, dtype: str) -> None:
        self.cluster, self.dtype = cluster, dtype
        self.places = {"tp": (split.tp, 1), "up": (split.up, split.tp), "dp": (split.copies, split.tp)}
        self.machines = {axis: cluster.group(*place) for axis, place in self.places.items()}

    def call(self, operator: Operator) -> Call:
        """One operator, planned; or computed by itself, where it moves nothing."""
        if not operator.op:
            seconds = self._local_s(operator.sizes)
            return Call(*operator[:4], operator.times, 1, "", seconds, seconds, 0.0, 0.0, seconds, 0, "moves nothing")
        found = self.plan(operator)
        taken, bare_s = found.predicted_s, found.compute_s
        if found.code == "one_rank":
            return Call(*operator[:4], operator.times, 1, "", taken, taken, 0.0, 0.0, found.bound_s, 0, found.reason)
        exposed_s, plain_s = max(0.0, taken - bare_s), max(0.0, plain_seconds(found) - bare_s)
        return Call(
            *operator[:4], operator.times, len(found.rows), str(found.choice),
            taken, bare_s, exposed_s, plain_s, found.bound_s, bytes_sent(found), found.reason,
        )  # fmt: skip

    def transfers(self, operators: Sequence[Operator], reason: str) -> Call:
        """Operators that compute nothing, one after another beside others, as one call of which nothing is exposed."""
        site, phase, _, axis, _, times = operators[0]
        found = [self.plan(operator) for operator in operators]
        seconds = sum(each.predicted_s for each in found)
        return Call(
            site, phase, " + ".join(operator.op for operator in operators), axis, times, len(found[0].rows),
            " + ".join(str(each.choice) for each in found),
            seconds, 0.0, 0.0, seconds, sum(each.bound_s for each in found), sum(map(bytes_sent, found)), reason,
        )  # fmt: skip

    def plan(self, operator: Operator) -> Plan:
        """The plan of one operator on its group."""
        ranks, machine = self.places[operator.axis][0], self.machines[operator.axis]
        return plan(operator.op, operator.sizes, machine, ranks=ranks, dtype=self.dtype)

    def share_a_wire(self, axis: str, other: str) -> bool:
        """Whether what two groups move takes the same wires: those inside of nodes, or those between them."""
        first, second = (self.cluster.crosses_nodes(*self.places[each]) for each in (axis, other))
        return first == second

    def _local_s(self, sizes: Sizes) -> float:
        itemsize = 4 if self.dtype == "float32" else 2
        return _whole(sizes, "rows") * _whole(sizes, "touched") * itemsize / self.cluster.matmul.memory_bytes_per_s


def plain_seconds(found: Plan) -> float:
    """Seconds of the best candidate that overlaps nothing."""
    return min(each.seconds for each in found.candidates if each.mode in ("off", "collective"))


def bytes_sent(found: Plan) -> int:
    """Bytes that a rank sends, whoever moves them: those of the ideal algorithm."""
    return replace(found, candidates=(Candidate("off", "sliced", 1),)).schedule().wire_bytes(0)


def _whole(sizes: Sizes, name: str) -> int:
    value = sizes.get(name, 0)
    assert isinstance(value, int)
    return value
