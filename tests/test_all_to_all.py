"""All-to-alls with kernels on either side: laid out, proved right, and as fast as they can be."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashoverlap.all_to_all import all_to_all
from flashoverlap.flow import ALL_TO_ALLS, flow_of
from flashoverlap.machine import Kernel, Link, Machine
from flashoverlap.patterns import PATTERNS
from flashoverlap.schedule import Collective, Compute, Exchange, Schedule, ScheduleError
from flashoverlap.simulate import simulate
from flashoverlap.verify import verify

VARIANTS = [
    *ALL_TO_ALLS,
    "all_to_all_backward-w",
    "all_to_all_backward-z",
    "all_to_all_matmul_backward-w",
    "attention_all_to_all_backward-w",
]
BOTH_ENDS = ("attention_all_to_all", "attention_all_to_all_backward")
ways = st.sampled_from(PATTERNS).flatmap(
    lambda pattern: st.tuples(st.just(pattern), st.just(1) if pattern == "collective" else st.integers(1, 5))
)
sizes = st.integers(0, 40) | st.just(0)


def built(op, n=3, pattern="direct", splits=1, tensors=1, rows=None):
    return all_to_all(rows or [[splits] * n] * n, op=op, pattern=pattern, splits=splits, tensors=tensors)


def test_sizes_are_those_of_names_that_there_are():
    for splits, wrong in (
        (2, ("p0_1", "pc0_1.0", "z0", "z0.0", "p0_1.2", "p2_1.0", "q0_1.0")),
        (1, ("p0_1.0", "pc0_1")),
    ):
        schedule = built("all_to_all", n=2, splits=splits, tensors=2, rows=[[4, 5], [6, 7]])
        assert {schedule.size(name).rows for name, _ in schedule.sizes} <= {2, 3, 4, 5, 6, 7}
        for name in wrong:
            with pytest.raises(ScheduleError, match="no size"):
                schedule.size(name)
    summed = built("all_to_all_backward", n=2, splits=2, tensors=2, rows=[[4, 4]] * 2)
    assert summed.size("z1.1").rows == 2
    for name in ("wx", "wc", "z1"):
        with pytest.raises(ScheduleError, match="no size"):
            summed.size(name)


# --- laid out -----------------------------------------------------------------------------------------------------------

RANK_1_OF_3 = {
    ("all_to_all_matmul", "direct"): """
        xchg p1_2>2 p0_1<0 | xchg p1_0>0 p2_1<2 | z1=mm(p1_1) | z1=mm(p0_1)+z1 | z1=mm(p2_1)+z1""",
    ("all_to_all_matmul", "ring"): """
        xchg p1_0>2 p0_2<0 | xchg p0_2>2 p2_1<0 | xchg p1_2>2 p0_1<0 | z1=mm(p1_1) | z1=mm(p2_1)+z1 | z1=mm(p0_1)+z1""",
    ("all_to_all_matmul", "sliced"): """
        xchg p1_2>2 p0_1<0 | xchg p1_0>0 p2_1<2 | z1=mm(p2_1) | z1=mm(p0_1)+z1 | z1=mm(p1_1)+z1""",
    ("all_to_all_matmul", "collective"): """
        all_to_all p1_0 p1_1 p1_2 -> p0_1 p1_1 p2_1 | z1=mm(p1_1) | z1=mm(p0_1)+z1 | z1=mm(p2_1)+z1""",
    ("all_to_all_backward", "direct"): """
        xchg p1_2>2 p0_1<0 | xchg p1_0>0 p2_1<2 | z1=mm(p1_1) | w=wgrad(p1_1)
        | z1=mm(p0_1)+z1 | w=wgrad(p0_1)+w | z1=mm(p2_1)+z1 | w=wgrad(p2_1)+w""",
    ("all_to_all_matmul_backward", "direct"): """
        p1_2=mm(a1_2) | xchg p1_2>2 p0_1<0 | p1_0=mm(a1_0) | xchg p1_0>0 p2_1<2 | p1_1=mm(a1_1) | w=wgrad()""",
    ("all_to_all_matmul_backward", "sliced"): """
        w=wgrad() | p1_0,p1_1,p1_2=mm(a1_0,a1_1,a1_2) | xchg p1_2>2 p0_1<0 | xchg p1_0>0 p2_1<2""",
    ("attention_all_to_all", "direct"): """
        p1_2=attend(a1_2) | xchg p1_2>2 p0_1<0 | p1_0=attend(a1_0) | xchg p1_0>0 p2_1<2
        | p1_1=attend(a1_1) | z1=mm(p1_1) | z1=mm(p0_1)+z1 | z1=mm(p2_1)+z1""",
    ("attention_all_to_all_backward", "direct"): """
        p1_2=mm(a1_2) | xchg p1_2>2 p0_1<0 | p1_0=mm(a1_0) | xchg p1_0>0 p2_1<2 | p1_1=mm(a1_1)
        | y1_1=attend_backward(p1_1) | w=wgrad() | y0_1=attend_backward(p0_1) | y2_1=attend_backward(p2_1)""",
}


@pytest.mark.parametrize(("op", "pattern"), RANK_1_OF_3)
def test_program_of_rank_1_of_3(op, pattern):
    expected = " ".join(RANK_1_OF_3[op, pattern].split())
    assert " | ".join(map(str, built(op, pattern=pattern).programs[1])) == expected


def test_tensors_take_turns_split_by_split():
    assert " | ".join(map(str, built("all_to_all_backward", 2, splits=2, tensors=2).programs[0])) == (
        "xchg p0_1.0>1 p1_0.0<1 | xchg pb0_1.0>1 pb1_0.0<1 | xchg p0_1.1>1 p1_0.1<1 | xchg pb0_1.1>1 pb1_0.1<1 | "
        "z0.0=mm(p0_0.0) | w=wgrad(p0_0.0) | z0.0=mm(pb0_0.0)+z0.0 | wb=wgrad(pb0_0.0) | "
        "z0.1=mm(p0_0.1) | w=wgrad(p0_0.1)+w | z0.1=mm(pb0_0.1)+z0.1 | wb=wgrad(pb0_0.1)+wb | "
        "z0.0=mm(p1_0.0)+z0.0 | w=wgrad(p1_0.0)+w | z0.0=mm(pb1_0.0)+z0.0 | wb=wgrad(pb1_0.0)+wb | "
        "z0.1=mm(p1_0.1)+z0.1 | w=wgrad(p1_0.1)+w | z0.1=mm(pb1_0.1)+z0.1 | wb=wgrad(pb1_0.1)+wb"
    )


def test_own_block_is_made_last_and_used_first():
    for op in BOTH_ENDS:
        for pattern in ("direct", "ring"):
            for rank, program in enumerate(built(op, 5, pattern, splits=2).programs):
                computed = [op.writes[0] for op in program if isinstance(op, Compute) and op.reads]
                made = [name for name in computed if name[0] == "p"]
                last_post = max(at for at, op in enumerate(program) if isinstance(op, Exchange))
                assert made[-1] == f"p{rank}_{rank}.0"
                assert str(program[last_post + 1].writes[0]) == made[-1]
                used = [op.reads[0] for op in program[last_post + 2 :] if isinstance(op, Compute) and op.reads]
                assert [name.partition(".")[0] for name in used[:2]] == [f"p{rank}_{rank}"] * 2


# --- proved right -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("op", VARIANTS)
def test_every_all_to_all_is_right(op, pattern):
    for n in range(1, 9):
        for splits in (1,) if pattern == "collective" or n > 5 else (1, 3):
            for tensors in (1, 3)[: 2 if n < 6 else 1]:
                rows = [[(3 * target) % 5 for target in range(n)]] * n
                schedule = built(op, n, pattern, splits, tensors, rows)
                proof = verify(schedule)
                assert proof.op == op
                assert Schedule.parse(str(schedule)) == schedule


@settings(max_examples=100, deadline=None)
@given(op=st.sampled_from(VARIANTS), n=st.integers(1, 8), way=ways, tensors=st.integers(1, 3), data=st.data())
def test_uneven_blocks(op, n, way, tensors, data):
    row = st.lists(sizes, min_size=n, max_size=n)
    rows = [data.draw(row)] * n if flow_of(op).reduce else data.draw(st.lists(row, min_size=n, max_size=n))
    widths = {"p": rows, "pb": 3, "z": 2}
    schedule = all_to_all(rows, op=op, pattern=way[0], splits=way[1], tensors=tensors, row_bytes=widths)
    assert bool(verify(schedule).collectives) <= (way[0] == "collective")
    if way[0] in ("direct", "sliced"):
        each = [1, 3, 1][:tensors]
        for rank in range(n):
            leaves = [rows[rank][to] for to in range(n) if to != rank]
            first = sum(count * count for count in leaves)
            assert schedule.wire_bytes(rank) == first + sum(sum(leaves) * width for width in each[1:])


def mutants(schedule):
    """Each operation of rank 1 left out, done twice, or changed for one with a foreign term."""
    program = schedule.programs[1]
    for at, op in enumerate(program):
        yield program[:at] + program[at + 1 :]
        yield program[: at + 1] + program[at:]
        if isinstance(op, Compute) and op.adds:
            yield (*program[:at], op._replace(adds=()), *program[at + 1 :])
        if isinstance(op, Compute) and op.kernel:
            yield (*program[:at], op._replace(kernel="other"), *program[at + 1 :])
        if isinstance(op, Exchange):
            yield (*program[:at], op._replace(to=op.frm, frm=op.to), *program[at + 1 :])


@pytest.mark.parametrize("op", VARIANTS)
def test_what_is_wrong_is_caught(op):
    for pattern in PATTERNS:
        schedule = built(op, 3, pattern, tensors=2)
        for program in mutants(schedule):
            wrong = replace(schedule, programs=(schedule.programs[0], program, schedule.programs[2]))
            with pytest.raises(ScheduleError):
                verify(wrong)


@pytest.mark.parametrize(
    ("op", "rows", "options", "error", "told"),
    [
        ("mlp", [[1]], {}, ValueError, "mlp is no all-to-all"),
        ("all_to_all_matmul_backward-p", [[1]], {}, ValueError, "is no all-to-all"),
        ("all_to_all_matmul", [[1, 2], [3, 2]], {}, ScheduleError, r"sums blocks of equal rows.*\[1, 3\]"),
        ("all_to_all", [[1, 2], [3]], {}, ScheduleError, r"2 rows of 2 sizes, not \[2, 1\]"),
        ("all_to_all", [[1]], {"tensors": 0}, ScheduleError, "1 to 26 tensors"),
        ("all_to_all", [[1]], {"tensors": 27}, ScheduleError, "1 to 26 tensors"),
        ("all_to_all", [[1]], {"pattern": "collective", "splits": 2}, ScheduleError, "use 'sliced'"),
    ],
)
def test_arguments(op, rows, options, error, told):
    with pytest.raises(error, match=told):
        all_to_all(rows, op=op, **options)


# --- as fast as they can be ---------------------------------------------------------------------------------------------

ROWS = 64
COST = {"mm": 1.0, "attend": 1.5, "attend_backward": 2.5, "wgrad": 1.0}


def machine(wire):
    """A block of ROWS rows takes COST seconds to compute and ``wire`` to move; local weight gradients are free."""
    return Machine(Link(0.0, ROWS / wire), {name: Kernel(0.0, cost / ROWS) for name, cost in COST.items()})


def compute_of(op, n):
    kernels = [*flow_of(op).kernels, *(w.kernel for w in flow_of(op).wgrads if w.reads)]
    return n * sum(COST[kernel] for kernel in kernels)


def ends_of(op):
    """Seconds of a block before the exchange and after it."""
    flow = flow_of(op)
    after = [*flow.kernels[flow.swap :], *(w.kernel for w in flow.wgrads if w.reads)]
    return sum(COST[kernel] for kernel in flow.kernels[: flow.swap]), sum(COST[kernel] for kernel in after)


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("op", ["all_to_all", "all_to_all_matmul", "all_to_all_backward", *BOTH_ENDS])
def test_the_makespan_is_compute_or_wire_and_one_split(op, n):
    before, after = ends_of(op)
    compute = compute_of(op, n)
    for splits in (1, 2, 4, 8):
        schedule = built(op, n, splits=splits, rows=[[ROWS] * n] * n)
        for wire in (0.1, 0.5, 1.0, 1.9, 2.0, 2.5, 4.0, 20.0):
            trace, moved = simulate(schedule, machine(wire), spans=False), (n - 1) * wire
            assert [trace.compute_s(rank) for rank in range(n)] == pytest.approx([compute] * n)
            # of one split, what stands before its flight and what after it: a slower wire waits for these alone
            assert trace.makespan_s <= max(compute, moved + (before + after) / splits) + 1e-9
            if moved + before + after <= compute:
                assert trace.makespan_s == pytest.approx(compute), "everything is hidden"


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_one_slice_overlaps_nothing_and_slices_leave_a_tail(n):
    for op in BOTH_ENDS:
        blocks = [[ROWS] * n] * n
        compute, wire = compute_of(op, n), (n - 1) * 1.0
        off = simulate(all_to_all(blocks, op=op, pattern="sliced"), machine(1.0), spans=False)
        assert off.makespan_s == pytest.approx(compute + wire)
        times = [
            simulate(all_to_all(blocks, op=op, pattern=pattern, splits=4), machine(1.0), spans=False).makespan_s
            for pattern in ("sliced", "direct")
        ]
        assert times[1] <= times[0] < compute + wire


def test_a_local_weight_gradient_hides_the_last_flight():
    """What the wire still carries when all blocks are made flies behind it."""
    kernels = {"mm": Kernel(0.0, 1.0 / ROWS), "wgrad": Kernel(2.0)}
    on = Machine(Link(0.0, ROWS / 2.0), kernels)
    schedule = built("all_to_all_matmul_backward", 3, splits=4, rows=[[ROWS] * 3] * 3)
    assert simulate(schedule, on, spans=False).makespan_s == pytest.approx(3 * 1.0 + 2.0)


def test_ring_moves_what_the_distances_say():
    n = 4
    ring = built("attention_all_to_all", n, "ring", rows=[list(range(n))] * n)
    hops = sum(target * ((target - source) % n) for source in range(n) for target in range(n))
    assert sum(ring.wire_bytes(rank) for rank in range(n)) == hops
    assert not any(isinstance(op, Exchange | Collective) for op in built("all_to_all_matmul", 1, "ring").programs[0])
