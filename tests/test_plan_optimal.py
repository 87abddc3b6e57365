"""How far the planner's choice is from the best order of all, which a constraint solver finds for small instances."""

import pytest

pytest.importorskip("ortools")

from exact import Instance
from flashoverlap import Kernel, Link, Machine, Overlap, plan
from flashoverlap.flow import FLOWS

ROWS = 16  # of a piece: the planner splits it in two at the most, and so does the solver
KERNELS = ("mm", "up", "down", "wgrad", "wgrad_up", "wgrad_down")
SIZES = ("features", "hidden", "out")

# seconds of a piece: in a kernel, on the wire, for each addition
TIMES = ((8, 4, 0), (8, 8, 0), (8, 12, 2), (4, 16, 2), (8, 20, 2))
EVEN = ((1, 1), (1, 1, 1), (1, 1, 1, 1))
SLOW = ((1, 3), (1, 1, 3), (1, 1, 1, 3))  # the wire of the last rank is three times slower

# The most that the fastest candidate takes, over all of TIMES, in terms of the best order.
OPTIMAL = ("all_gather_matmul", "matmul_reduce_scatter", "mlp", "row_backward", "all_reduce_backward")
LOSS = {"all_reduce": 1.055, "column_backward": 1.025, "column_backward_saved": 1.04, "mlp_backward": 1.065}


def candidates(op, slowness, compute_s, wire_s, add_s):
    """The candidates on a machine where a piece takes these seconds; but for the backend's collective, which adds by
    itself and at no cost here, so that the rules of the solver are not its."""
    n = len(slowness)
    kernels = {name: Kernel(0.0, compute_s / ROWS) for name in KERNELS}
    if any(not w.reads for w in FLOWS[op].wgrads):
        kernels["wgrad"] = Kernel(compute_s * n)
    links = tuple(Link(0.0, 4 * ROWS / wire_s / slow) for slow in slowness)
    on = Machine(links[0], kernels, add=Kernel(0.0, add_s / ROWS), links=links)
    sizes = {name: 1 for name in SIZES if name != "hidden" or op.startswith("mlp")}
    for overlap in (Overlap("flash"), Overlap("flash", pattern="ring"), Overlap("slice"), Overlap("off")):
        yield from plan(op, {"rows": ROWS * n, **sizes}, on, overlap=overlap).candidates


def ratios(op, slowness):
    """What the fastest candidate takes in terms of the least that any order takes, for each of TIMES."""
    for compute_s, wire_s, add_s in TIMES:
        least = min(
            Instance(op, slowness, splits, compute_s // splits, wire_s // splits, add_s // splits).solve(2.0)[0]
            for splits in (1, 2)
        )
        fastest = min(each.seconds for each in candidates(op, slowness, compute_s, wire_s, add_s))
        yield fastest / least


@pytest.mark.parametrize("slowness", EVEN + SLOW, ids=str)
@pytest.mark.parametrize("op", OPTIMAL)
def test_no_order_is_faster(op, slowness):
    for ratio in ratios(op, slowness):
        assert ratio == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("slowness", [*EVEN, SLOW[-1]], ids=str)
@pytest.mark.parametrize("op", LOSS)
def test_the_best_order_is_faster_by_no_more_than(op, slowness):
    """Here additions or a weight gradient could fill waits that our order leaves, or a gather could wait for partials."""
    for ratio in ratios(op, slowness):
        assert 1.0 - 1e-6 <= ratio <= LOSS[op]


def test_the_solver_finds_what_is_known():
    # one kernel a piece: the wire, and the last piece's kernel that follows it; whole and in halves
    assert Instance("all_gather_matmul", (1,) * 4, 1, 8, 12).solve() == (44, 44)
    assert Instance("all_gather_matmul", (1,) * 4, 2, 4, 6).solve() == (40, 40)
    assert Instance("mlp", (1, 1), 1, 8, 4).solve() == (32, 32)  # all of it hidden
    assert Instance("matmul_reduce_scatter", (1, 1), 1, 8, 8, 2).solve() == (18, 18)  # but for the addition
    assert Instance("all_gather_matmul", (1, 3), 1, 8, 4).solve() == (20, 20)
