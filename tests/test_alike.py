"""One rank that stands for all: the same numbers as when all of them are replayed."""

import re
import time
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashoverlap.alike import alike_after
from flashoverlap.all_to_all import all_to_all
from flashoverlap.flow import ALL_TO_ALLS, FLOWS, flow_of
from flashoverlap.machine import Kernel, Link, Machine
from flashoverlap.patterns import PATTERNS, build
from flashoverlap.schedule import Compute, Exchange, Programs, Schedule, ScheduleError
from flashoverlap.simulate import simulate
from flashoverlap.trace import exposed_seconds

ROWS = 64
KERNELS = {name: Kernel(0.1, 1 / ROWS) for name in ("mm", "up", "down", "wgrad", "wgrad_up", "wgrad_down")}
LINK = Link(0.25, ROWS / 0.7)
MACHINES = {
    "plain": Machine(LINK, KERNELS, add=Kernel(0.1, 0.01)),
    "contention": Machine(LINK, KERNELS, contention=0.3),
    "ports": Machine(Link(0.5, ROWS / 3), KERNELS, ports=2, issue_s=0.01),
    "burst": Machine(Link(0.1, ROWS, burst_bytes=ROWS / 2), KERNELS),
    "two nodes": Machine(LINK, KERNELS, nodes=(3, 3), uplink=Link(0.3, ROWS * 1.3)),
}


def unfolded(schedule):
    """The same programs as a plain tuple, of which nothing is known."""
    return replace(schedule, programs=tuple(schedule.programs))


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("op", FLOWS)
def test_alike_ranks_take_the_same_times_as_all_ranks(op, pattern, name):
    on = MACHINES[name]
    for splits, nodes in product((1,) if pattern == "collective" else (1, 3), (1, 2)):
        schedule = build(op, [ROWS] * 6, pattern=pattern, splits=splits, nodes=nodes)
        spread = nodes > 1 and pattern in ("direct", "sliced")
        assert alike_after(schedule, on) == (3 if spread or on.uplink else 1)
        found = simulate(schedule, on, spans=False)
        expected = simulate(unfolded(schedule), on, spans=False)
        for totals, want in zip(found.totals, expected.totals, strict=True):
            assert totals == pytest.approx(want, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(FLOWS)), st.sampled_from(["direct", "ring", "sliced"]), st.integers(2, 8), st.integers(1, 3)
)
def test_a_program_is_that_of_a_rank_before_it_turned(op, pattern, n, splits):
    """But for the order in which a kernel names all pieces, or a sum its terms, which is the same on every rank."""
    schedule = build(op, [6] * n, pattern=pattern, splits=splits)
    for rank in range(1, n):
        expected = [turned(each, rank, n) for each in schedule.programs[0]]
        assert expected == [turned(each, 0, n) for each in schedule.programs[rank]]


def turned(op, by, n):
    """``op`` of rank 0 as rank ``by`` does it."""

    def name(text):
        return re.sub(r"^([a-z])(\d+)|@(\d+)", lambda m: f"{m[1] or '@'}{(int(m[2] or m[3]) + by) % n}", text)

    if isinstance(op, Exchange):
        return Exchange(name(op.send), (op.to + by) % n, name(op.recv), (op.frm + by) % n)
    return op.kernel, *({*map(name, names)} for names in op[1:])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("op", ALL_TO_ALLS)
def test_alike_ranks_of_an_all_to_all(op, pattern):
    kernels = {name: Kernel(0.1, 1 / ROWS) for name in ("mm", "attend", "attend_backward", "wgrad")}
    on = Machine(LINK, kernels, add=Kernel(0.1, 0.01), contention=0.2)
    schedule = all_to_all(
        [[ROWS] * 5] * 5, op=op, pattern=pattern, splits=1 if pattern == "collective" else 2, tensors=2
    )
    assert alike_after(schedule, on) == 1
    found, expected = (simulate(each, on, spans=False) for each in (schedule, unfolded(schedule)))
    for totals, want in zip(found.totals, expected.totals, strict=True):
        assert totals == pytest.approx(want, rel=1e-12)
    uneven = [[ROWS] * 5] * 4 + [[ROWS, ROWS, ROWS, ROWS, 1]]
    if not flow_of(op).reduce:
        assert alike_after(all_to_all(uneven, op=op, pattern=pattern), on) == 5
    assert alike_after(all_to_all([[ROWS] * 5] * 5, op=op, row_bytes={"p": [[1] * 5] * 5}), on) == 5


def test_ranks_that_differ_are_all_replayed():
    schedule, slow = build("mlp", [ROWS] * 4), Link(1.0, 1.0)
    assert alike_after(schedule, Machine(LINK, KERNELS)) == 1
    assert alike_after(schedule, Machine(LINK, KERNELS, links=(LINK,) * 4)) == 1
    assert alike_after(schedule, Machine(LINK, KERNELS, links=(LINK, LINK, LINK, slow))) == 4
    assert alike_after(schedule, Machine(LINK, KERNELS, nodes=(1, 3), uplink=slow)) == 4
    assert alike_after(build("mlp", [ROWS, ROWS, ROWS, 1]), Machine(LINK, KERNELS)) == 4
    assert alike_after(Schedule.parse(str(schedule)), Machine(LINK, KERNELS)) == 4


def test_what_is_not_in_rounds_is_replayed_in_full_and_refused_with_the_place():
    def ahead(rank):  # sends ahead and waits for what is ahead
        return [Exchange(f"x{rank}", (rank + 1) % 4, f"x{(rank + 1) % 4}", (rank + 1) % 4)]

    schedule = Schedule("any", Programs(ahead, 4, 1), build("all_gather_matmul", [1] * 4).sizes)
    assert alike_after(schedule, Machine(LINK)) == 4
    with pytest.raises(ScheduleError, match="cannot finish: rank 0: x0 never leaves for rank 1"):
        simulate(schedule, Machine(LINK), spans=False)


def test_programs_are_made_when_they_are_asked_for():
    made = []

    def make(rank):
        made.append(rank)
        return [Compute("mm", (), (f"y{rank}",))]

    programs = Programs(make, 5, 1)
    assert len(programs) == 5
    assert programs[2] is programs[2] is programs[-3]
    assert made == [2]
    assert programs[1:3] == (programs[1], programs[2])
    assert programs == tuple(programs) != ()
    assert hash(programs) == hash(tuple(programs))
    with pytest.raises(IndexError):
        programs[5]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_layer_on_a_thousand_ranks_takes_a_moment(pattern):
    began = time.perf_counter()
    schedule = build("mlp_backward", [ROWS] * 1024, pattern=pattern)
    trace = simulate(schedule, replace(MACHINES["plain"], add=Kernel()), spans=False)
    assert time.perf_counter() - began < 5.0  # asked of it; it takes some 0.1 s
    assert trace.ranks == 1024
    assert exposed_seconds(trace) >= 0
