"""The programs that the builders lay out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashoverlap.all_to_all import all_to_all
from flashoverlap.flow import FLOWS
from flashoverlap.patterns import (
    PATTERNS,
    all_gather_matmul,
    all_reduce,
    build,
    matmul_reduce_scatter,
    mlp,
    split_sizes,
)
from flashoverlap.schedule import Compute, Exchange, ScheduleError

# Rank 1 of 3, whole pieces.
RANK_1_OF_3 = """
all_gather_matmul     direct     xchg x1>0 x2<2 | xchg x1>2 x0<0 | y1=mm(x1) | y2=mm(x2) | y0=mm(x0)
all_gather_matmul     ring       xchg x1>2 x0<0 | xchg x0>2 x2<0 | y1=mm(x1) | y0=mm(x0) | y2=mm(x2)
all_gather_matmul     sliced     xchg x1>0 x2<2 | xchg x1>2 x0<0 | y0,y1,y2=mm(x0,x1,x2)
all_gather_matmul     collective all_gather x1 -> x0 x1 x2 | y0,y1,y2=mm(x0,x1,x2)
matmul_reduce_scatter direct     p2=mm(h2) | xchg p2>2 p1@0<0 | p0=mm(h0) | xchg p0>0 p1@2<2 | z1=mm(h1) | z1=z1+p1@0+p1@2
matmul_reduce_scatter ring       p0=mm(h0) | xchg p0>2 p2@0<0 | p2=mm(h2) | p2=p2+p2@0 | xchg p2>2 p1@0<0 | z1=mm(h1) | z1=z1+p1@0
matmul_reduce_scatter sliced     p0,p1,p2=mm(h0,h1,h2) | xchg p2>2 p1@0<0 | xchg p0>0 p1@2<2 | z1=p1+p1@0+p1@2
matmul_reduce_scatter collective p0,p1,p2=mm(h0,h1,h2) | reduce_scatter p0 p1 p2 -> z1
all_reduce            direct     p2=mm(h2) | xchg p2>2 p1@0<0 | p0=mm(h0) | xchg p0>0 p1@2<2 | z1=mm(h1) | z1=z1+p1@0+p1@2 | xchg z1>0 z2<2 | xchg z1>2 z0<0
all_reduce            ring       p0=mm(h0) | xchg p0>2 p2@0<0 | p2=mm(h2) | p2=p2+p2@0 | xchg p2>2 p1@0<0 | z1=mm(h1) | z1=z1+p1@0 | xchg z1>2 z0<0 | xchg z0>2 z2<0
all_reduce            collective p0,p1,p2=mm(h0,h1,h2) | all_reduce p0 p1 p2 -> z0 z1 z2
mlp                   direct     xchg x1>0 x2<2 | xchg x1>2 x0<0 | h1=up(x1) | h2=up(x2) | p2=down(h2) | xchg p2>2 p1@0<0 | h0=up(x0) | p0=down(h0) | xchg p0>0 p1@2<2 | z1=down(h1) | z1=z1+p1@0+p1@2
row_backward          direct     xchg x1>0 x2<2 | xchg x1>2 x0<0 | y1=mm(x1) | y2=mm(x2) | y0=mm(x0) | w=wgrad(x0,x1,x2)
row_backward-y        direct     xchg x1>0 x2<2 | xchg x1>2 x0<0 | w=wgrad(x0,x1,x2)
column_backward       direct     xchg g1>0 g2<2 | xchg g1>2 g0<0 | p2=mm(h2) | xchg p2>2 p1@0<0 | p0=mm(h0) | xchg p0>0 p1@2<2 | z1=mm(h1) | w=wgrad(g0,g1,g2) | z1=z1+p1@0+p1@2
column_backward_saved direct     p2=mm(h2) | xchg p2>2 p1@0<0 | p0=mm(h0) | xchg p0>0 p1@2<2 | w=wgrad() | z1=mm(h1) | z1=z1+p1@0+p1@2
column_backward-w     direct     p2=mm(h2) | xchg p2>2 p1@0<0 | p0=mm(h0) | xchg p0>0 p1@2<2 | z1=mm(h1) | z1=z1+p1@0+p1@2
"""

# Rank 1 of 2, two splits.
RANK_1_OF_2_SPLIT = """
all_gather_matmul     direct     xchg x1.0>0 x0.0<0 | xchg x1.1>0 x0.1<0 | y1.0,y1.1=mm(x1.0,x1.1) | y0.0=mm(x0.0) | y0.1=mm(x0.1)
all_gather_matmul     sliced     xchg x1.0>0 x0.0<0 | xchg x1.1>0 x0.1<0 | y0.0,y1.0=mm(x0.0,x1.0) | y0.1,y1.1=mm(x0.1,x1.1)
matmul_reduce_scatter direct     p0.0=mm(h0.0) | xchg p0.0>0 p1.0@0<0 | p0.1=mm(h0.1) | xchg p0.1>0 p1.1@0<0 | z1.1=mm(h1.1) | z1.0=mm(h1.0)+p1.0@0 | z1.1=z1.1+p1.1@0
matmul_reduce_scatter sliced     p0.0,p1.0=mm(h0.0,h1.0) | xchg p0.0>0 p1.0@0<0 | p0.1,p1.1=mm(h0.1,h1.1) | xchg p0.1>0 p1.1@0<0 | z1.0=p1.0+p1.0@0 | z1.1=p1.1+p1.1@0
all_reduce            direct     p0.0=mm(h0.0) | xchg p0.0>0 p1.0@0<0 | p0.1=mm(h0.1) | xchg p0.1>0 p1.1@0<0 | z1.0=mm(h1.0)+p1.0@0 | xchg z1.0>0 z0.0<0 | z1.1=mm(h1.1) | z1.1=z1.1+p1.1@0 | xchg z1.1>0 z0.1<0
"""


def table(text):
    return [tuple(line.split(maxsplit=2)) for line in text.strip().splitlines()]


@pytest.mark.parametrize(("op", "pattern", "expected"), table(RANK_1_OF_3))
def test_program_of_rank_1_of_3(op, pattern, expected):
    assert " | ".join(map(str, build(op, [1] * 3, pattern=pattern).programs[1])) == expected


@pytest.mark.parametrize(("op", "pattern", "expected"), table(RANK_1_OF_2_SPLIT))
def test_program_of_rank_1_of_2_with_two_splits(op, pattern, expected):
    assert " | ".join(map(str, build(op, [2] * 2, pattern=pattern, splits=2).programs[1])) == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("direct", "p1_2=mm(a1_2) | xchg p1_2>2 p0_1<0 | p1_0=mm(a1_0) | xchg p1_0>0 p2_1<2 | p1_1=mm(a1_1)"),
        (
            "ring",
            "p1_0=mm(a1_0) | xchg p1_0>2 p0_2<0 | xchg p0_2>2 p2_1<0 | p1_2=mm(a1_2) | xchg p1_2>2 p0_1<0 | p1_1=mm(a1_1)",
        ),
        ("sliced", "p1_0,p1_1,p1_2=mm(a1_0,a1_1,a1_2) | xchg p1_2>2 p0_1<0 | xchg p1_0>0 p2_1<2"),
        ("collective", "p1_0,p1_1,p1_2=mm(a1_0,a1_1,a1_2) | all_to_all p1_0 p1_1 p1_2 -> p0_1 p1_1 p2_1"),
    ],
)
def test_all_to_all_of_rank_1_of_3(pattern, expected):
    assert " | ".join(map(str, all_to_all([[1] * 3] * 3, pattern=pattern).programs[1])) == expected


def test_one_rank_moves_nothing():
    assert [str(op) for op in build("mlp", [4]).programs[0]] == ["h0=up(x0)", "z0=down(h0)"]


RINGS = ("direct", "ring", "sliced")


def pieces(op):
    """How many times every byte of the op's pieces must reach all other ranks, or come from them."""
    flow = FLOWS[op]
    return flow.gather + bool(flow.extra) + {"": 0, "reduce_scatter": 1, "all_reduce": 2}[flow.reduce]


@pytest.mark.parametrize("pattern", RINGS)
@pytest.mark.parametrize("op", FLOWS)
@pytest.mark.parametrize("splits", [1, 3])
def test_bytes_on_the_wire_are_ideal(op, pattern, splits):
    for n in (1, 2, 3, 5, 8):
        even = build(op, [6] * n, pattern=pattern, splits=splits)
        assert [even.wire_bytes(rank) for rank in range(n)] == [
            pieces(op) * (n - 1) * 6
        ] * n  # (n-1)/n of 6n a direction
        rows = [7 * rank % 5 for rank in range(n)]
        uneven = build(op, rows, pattern=pattern, splits=splits)
        assert sum(uneven.wire_bytes(rank) for rank in range(n)) == pieces(op) * (n - 1) * sum(rows)


@pytest.mark.parametrize("splits", [1, 3])
def test_bytes_of_an_all_to_all(splits):
    n = 5
    rows = [[(3 * source + 5 * target) % 7 for target in range(n)] for source in range(n)]
    for pattern in ("direct", "sliced"):
        schedule = all_to_all(rows, pattern=pattern, splits=splits, row_bytes={"p": 4})
        for rank in range(n):
            assert schedule.wire_bytes(rank) == 4 * sum(rows[rank][to] for to in range(n) if to != rank)
    ring = all_to_all(rows, pattern="ring", splits=splits)
    hops = sum(rows[source][target] * ((target - source) % n) for source in range(n) for target in range(n))
    assert sum(ring.wire_bytes(rank) for rank in range(n)) == hops


def rounds(schedule):
    exchanges = [[op for op in program if isinstance(op, Exchange)] for program in schedule.programs]
    return list(zip(*exchanges, strict=True))


@pytest.mark.parametrize("pattern", RINGS)
@pytest.mark.parametrize("op", [*FLOWS, "all_to_all"])
def test_each_round_is_a_permutation(op, pattern):
    for n in range(1, 7):
        for splits in (1, 2):
            schedule = (
                all_to_all([[1] * n] * n, pattern=pattern, splits=splits)
                if op == "all_to_all"
                else build(op, [2] * n, pattern=pattern, splits=splits)
            )
            for ops in rounds(schedule):
                assert sorted(op.to for op in ops) == list(range(n))
                assert all(ops[op.to].frm == rank != op.to for rank, op in enumerate(ops))
                if pattern == "ring":
                    assert {(op.to - rank) % n for rank, op in enumerate(ops)} == {1}


def test_rounds_of_a_pattern_use_every_partner_once():
    for n in (2, 5, 8):
        for op in ("all_gather_matmul", "matmul_reduce_scatter"):
            for rank, program in enumerate(build(op, [1] * n).programs):
                partners = [op.to for op in program if isinstance(op, Exchange)]
                assert sorted(partners) == [other for other in range(n) if other != rank]


many = given(n=st.integers(2, 8), splits=st.integers(1, 5), pattern=st.sampled_from(["direct", "ring"]))


def computed(program):
    return [op for op in program if isinstance(op, Compute) and op.kernel and "wgrad" not in op.kernel]


def is_own(name, rank):
    return name[1:].partition(".")[0] == str(rank)


@pytest.mark.parametrize("op", ["all_gather_matmul", "mlp", "row_backward", "mlp_backward"])
@settings(max_examples=15, deadline=None)
@many
def test_the_own_piece_is_computed_first_where_pieces_are_gathered(op, n, splits, pattern):
    for rank, program in enumerate(build(op, [5] * n, pattern=pattern, splits=splits).programs):
        first = computed(program)[0]
        assert len(first.reads) == splits
        assert all(is_own(name, rank) for name in first.reads)


@pytest.mark.parametrize(
    "op", ["matmul_reduce_scatter", "mlp", "column_backward", "column_backward_saved", "all_reduce"]
)
@settings(max_examples=15, deadline=None)
@many
def test_the_own_piece_is_computed_last_where_partials_leave(op, n, splits, pattern):
    for rank, program in enumerate(build(op, [5] * n, pattern=pattern, splits=splits).programs):
        last = computed(program)[-1 if op == "all_reduce" else -splits :]
        assert all(is_own(name, rank) for op in last for name in op.writes)
        sums = [at for at, op in enumerate(program) if isinstance(op, Compute) and not op.kernel]
        assert sums[-1] > program.index(last[-1])
        partials = [at for at, op in enumerate(program) if isinstance(op, Exchange) and op.send[0] == "p"]
        assert partials[-1] < program.index(last[-1])  # the last partial flies beside it


@settings(max_examples=100, deadline=None)
@given(total=st.integers(0, 1000), parts=st.integers(1, 40))
def test_splits_follow_the_rule_of_tensor_split(total, parts):
    assert split_sizes(total, parts) == [len(part) for part in np.array_split(np.arange(total), parts)]


def test_uneven_pieces_have_their_sizes():
    schedule = build("mlp", [5, 0, 2], splits=2, row_bytes={"x": 3, "p": 7})
    assert [schedule.size(f"x{owner}.{split}").rows for owner in range(3) for split in range(2)] == [3, 2, 0, 0, 1, 1]
    assert schedule.size("x0.0").bytes == 9
    assert schedule.size("h0.1").bytes == 2
    assert schedule.size("p0.0@2").bytes == schedule.size("z0.0").bytes == 21
    assert build("mlp", [1], row_bytes={"p": 7, "z": 2}).size("z0").bytes == 2


def test_named_builders_and_the_cache():
    for builder, op in (
        (all_gather_matmul, "all_gather_matmul"),
        (matmul_reduce_scatter, "matmul_reduce_scatter"),
        (all_reduce, "all_reduce"),
        (mlp, "mlp"),
    ):
        assert builder([1, 2], splits=2) is build(op, (1, 2), splits=2)


def test_a_huge_schedule_is_not_kept_alive():
    kept, huge = [1] * 64, [1] * 129
    assert mlp(kept) is mlp(kept)
    assert mlp(huge) is not mlp(huge)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("mlp", []), {}, "mlp needs rows of zero or more for one rank or more, not \\[\\]"),
        (("mlp", [1, -1]), {}, "not \\[1, -1\\]"),
        (("mlp", [1]), {"pattern": "spiral"}, "unknown pattern 'spiral'; known: direct, ring, sliced, collective"),
        (("mlp", [1]), {"splits": 0}, "mlp needs at least one split, not 0"),
        (("mlp", [1]), {"pattern": "collective", "splits": 2}, "splits=2 means nothing there"),
    ],
)
def test_arguments_that_nothing_is_built_from(arguments, options, message):
    with pytest.raises(ScheduleError, match=message):
        build(*arguments, **options)


def test_unknown_operators_and_outputs():
    with pytest.raises(ValueError, match="unknown operator 'mpl'; known: all_gather_matmul"):
        build("mpl", [1])
    with pytest.raises(ValueError, match="mlp has no output 'w'"):
        build("mlp-w", [1])


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([[1, 2], [3]], {}, "all_to_all between 2 ranks needs 2 rows of 2 sizes, not \\[2, 1\\]"),
        ([[1, -2], [3, 4]], {}, "all_to_all needs rows of zero or more"),
        ([], {}, "all_to_all needs rows of zero or more for one rank or more"),
        ([[1]], {"pattern": "spiral"}, "unknown pattern 'spiral'"),
        ([[1]], {"splits": 0}, "at least one split"),
    ],
)
def test_all_to_all_arguments(rows, options, message):
    with pytest.raises(ScheduleError, match=message):
        all_to_all(rows, **options)


def test_patterns_are_listed():
    assert PATTERNS == ("direct", "ring", "sliced", "collective")
