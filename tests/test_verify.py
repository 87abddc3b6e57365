"""Right schedules are proved, and every wrong one is caught."""

import random
import time
from collections import Counter
from dataclasses import FrozenInstanceError, replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashoverlap.all_to_all import all_to_all
from flashoverlap.flow import FLOWS, flow_of
from flashoverlap.patterns import PATTERNS, build
from flashoverlap.schedule import Collective, Compute, Exchange, Schedule, ScheduleError
from flashoverlap.verify import verify


def variants(op):
    """The operator with any of its outputs left out: weight gradients first, then what is computed by piece."""
    wgrads = [w.write for w in FLOWS[op].wgrads]
    for count in range(len(wgrads) + 1):
        for dropped in permutations(wgrads, count):
            left = "-".join((op, *dropped))
            yield left
            if flow_of(left).output:
                yield f"{left}-{flow_of(left).output}"


VARIANTS = [variant for op in FLOWS for variant in variants(op)]
ways = st.sampled_from(PATTERNS).flatmap(
    lambda pattern: st.tuples(st.just(pattern), st.just(1) if pattern == "collective" else st.integers(1, 5))
)
sizes = st.integers(0, 40) | st.just(0)


def test_variants():
    assert {"mlp", "mlp-z", "mlp_backward-v-w-z", "mlp_backward-w-v-z", "mlp_backward-z"} <= set(VARIANTS)


@settings(max_examples=150, deadline=None)
@given(op=st.sampled_from(VARIANTS), rows=st.lists(sizes, min_size=1, max_size=8), way=ways)
def test_what_is_built_is_right(op, rows, way):
    schedule = build(op, rows, pattern=way[0], splits=way[1], row_bytes={"x": 4, "h": 3, "p": 2, "g": 5})
    proof = verify(schedule)
    assert proof.op == op
    assert proof.wire_bytes == tuple(schedule.wire_bytes(rank) for rank in range(len(rows)))
    assert len(proof.peak_bytes) == len(rows)
    assert proof.exchanges == sum(isinstance(op, Exchange) for program in schedule.programs for op in program)
    assert bool(proof.collectives) <= (way[0] == "collective")


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("op", VARIANTS)
def test_every_operator_is_right(op, pattern):
    for n in (1, 2, 3, 5):
        verify(build(op, range(n), pattern=pattern, splits=1 if pattern == "collective" else 2))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 8), way=ways, data=st.data())
def test_all_to_all_is_right(n, way, data):
    rows = data.draw(st.lists(st.lists(sizes, min_size=n, max_size=n), min_size=n, max_size=n))
    verify(all_to_all(rows, pattern=way[0], splits=way[1]))


def test_sixty_four_ranks_take_seconds_at_most():
    start = time.process_time()
    assert verify(build("mlp", [3] * 64)).exchanges == 64 * 63 * 2
    assert time.process_time() - start < 10


def test_a_proof_is_frozen():
    proof = verify(build("mlp", [2, 3]))
    assert proof == verify(build("mlp", [2, 3]))
    with pytest.raises(FrozenInstanceError):
        proof.op = "other"  # pyright: ignore


# --- mutations --------------------------------------------------------------------------------------------------------

SMALL = [
    build(op, rows, pattern=pattern, splits=splits)
    for op in FLOWS
    for rows, pattern, splits in (
        ([1, 2, 3], "direct", 1),
        ([3, 2], "direct", 2),
        ([1, 2, 3], "ring", 1),
        ([3, 2], "sliced", 2),
        ([1, 2], "collective", 1),
    )
] + [
    all_to_all([[3 * source + target + 1 for target in range(3)] for source in range(3)], pattern=pattern)
    for pattern in PATTERNS
]


def mutant(schedule, rank, program):
    programs = list(schedule.programs)
    programs[rank] = tuple(program)
    return replace(schedule, programs=tuple(programs))


def reads(schedule, op):
    """Names that ``op`` reads; a weight gradient that comes after kernels reads what they wrote."""
    if isinstance(op, Exchange):
        return {op.send}
    if isinstance(op, Collective):
        return set(op.reads)
    after = {w.write: w.after for w in flow_of(schedule.op).wgrads} if schedule.op in FLOWS else {}
    letter = flow_of(schedule.op).letters[after[op.writes[0]]] if after.get(op.writes[0]) else None
    return {*op.reads, *op.adds, *(name for name, _ in schedule.sizes if name[0] == letter)}


def writes(op):
    return {op.recv} if isinstance(op, Exchange) else set(op.writes)


def crosses(schedule, one, other):
    """Whether the order of two operations matters: one needs or overwrites what the other touches, or both are on the
    wire, whose order the other ranks rely on."""
    if not isinstance(one, Compute) and not isinstance(other, Compute):
        return True
    touched = [reads(schedule, op) | writes(op) for op in (one, other)]
    return bool(writes(one) & touched[1] or writes(other) & touched[0])


def swaps(schedule, rank):
    """Every pair of a rank's operations swapped. Exempt from being wrong are those swaps alone where neither of the two
    operations crosses the other or any operation between them: then no exchange moves relative to another exchange and
    no data dependency is crossed, and all values are the same. (They may hang, if a wait now stands before a post.)"""
    program = schedule.programs[rank]
    for last in range(len(program)):
        for first in range(last):
            swapped = list(program)
            swapped[first], swapped[last] = program[last], program[first]
            between = program[first + 1 : last]
            crossed = [(program[first], op) for op in (*between, program[last])] + [
                (program[last], op) for op in between
            ]
            exempt = not any(crosses(schedule, one, other) for one, other in crossed)
            yield "swap", exempt, mutant(schedule, rank, swapped)


def drops_and_doubles(schedule, rank):
    program = schedule.programs[rank]
    for at in range(len(program)):
        yield "drop", False, mutant(schedule, rank, program[:at] + program[at + 1 :])
        yield "double", False, mutant(schedule, rank, program[: at + 1] + program[at:])


def redirections(schedule, rank):
    program = schedule.programs[rank]
    for at, op in enumerate(program):
        if isinstance(op, Exchange):
            for target in range(-1, schedule.ranks + 1):
                for field in ("to", "frm"):
                    if target != getattr(op, field):
                        changed = op._replace(**{field: target})
                        yield (
                            f"redirect {field}",
                            False,
                            mutant(schedule, rank, (*program[:at], changed, *program[at + 1 :])),
                        )


def replacements(schedule, rank, each=12):
    """Every name of every operation replaced by some others that the schedule knows."""
    known = sorted(
        {name for program in schedule.programs for op in program for name in reads(schedule, op) | writes(op)}
    )
    program = schedule.programs[rank]
    for at, op in enumerate(program):
        for field in ("send", "recv", "reads", "writes", "adds"):
            value = getattr(op, field, ())
            names = (value,) if isinstance(value, str) else value
            for position, name in enumerate(names):
                others = [other for other in known if other != name]
                for other in random.Random(f"{at} {field} {position}").sample(others, min(each, len(others))):
                    new = (*names[:position], other, *names[position + 1 :])
                    changed = op._replace(**{field: other if isinstance(value, str) else new})
                    yield (
                        f"replace {field}",
                        False,
                        mutant(schedule, rank, (*program[:at], changed, *program[at + 1 :])),
                    )


def mutants(schedule):
    for rank in range(schedule.ranks):
        for kind in (drops_and_doubles, swaps, redirections, replacements):
            yield from kind(schedule, rank)


def complaint(schedule):
    try:
        verify(schedule)
    except ScheduleError as error:
        return str(error)
    return ""


def test_every_mutation_is_caught():
    caught, accepted = Counter(), Counter()
    for schedule in SMALL:
        assert not complaint(schedule)
        for kind, exempt, wrong in mutants(schedule):
            assert wrong != schedule
            found = complaint(wrong)
            assert found or exempt, f"a {kind} is not caught:\n{schedule}\n{wrong}"
            assert not (exempt and found) or "deadlock" in found, f"a harmless {kind} is refused: {found}"
            (accepted if exempt else caught)[kind] += 1
    kinds = {"drop", "double", "swap", "redirect to", "redirect frm"}
    kinds |= {f"replace {field}" for field in ("send", "recv", "reads", "writes", "adds")}
    assert set(caught) == kinds
    assert min(caught.values()) > 300, caught
    assert caught["swap"] > 2000
    assert set(accepted) == {"swap"}
    assert accepted["swap"] > 50


def test_a_harmless_swap_proves_the_same():
    schedule = build("all_gather_matmul", [1, 2, 3])

    def reordered(*order):
        return mutant(schedule, 0, [schedule.programs[0][at] for at in order])

    assert verify(reordered(2, 0, 1, 4, 3)).wire_bytes == verify(schedule).wire_bytes
    for order in (
        (1, 0, 2, 3, 4),
        (2, 1, 0, 3, 4),
        (3, 0, 1, 2, 4),
    ):  # exchanges swapped, or read before they are posted
        refused(reordered(*order))


# --- by hand ----------------------------------------------------------------------------------------------------------


def parse(op, sizes, *programs):
    lines = [f"rank {rank}: {program}" for rank, program in enumerate(programs)]
    return Schedule.parse("\n".join([f"schedule {op} ranks={len(programs)}", f"size {sizes}", *lines]))


def refused(schedule):
    with pytest.raises(ScheduleError) as caught:
        verify(schedule)
    return caught.value


THREE = "x0=1x1 x1=1x1 x2=1x1 y0=1x1 y1=1x1 y2=1x1"
AHEAD = "xchg x0>1 x2<2 | y2=mm(x2) | xchg x0>2 x1<1 | y1=mm(x1) | y0=mm(x0)"
BACK = "xchg x1>0 x2<2 | y2=mm(x2) | xchg x1>2 x0<0 | y0=mm(x0) | y1=mm(x1)"
POSTED = "xchg x2>0 x1<1 | xchg x2>1 x0<0 | y0=mm(x0) | y1=mm(x1) | y2=mm(x2)"


def test_two_ranks_that_compute_before_they_post_wait_for_each_other():
    error = refused(parse("all_gather_matmul", THREE, AHEAD, BACK, POSTED))
    assert (error.rank, error.index) == (0, 1)
    assert str(error).splitlines() == [
        "deadlock, no rank can move:",
        "  rank 0: y2=mm(x2) waits for x2",
        "  rank 0: xchg x0>1 x2<2 waits for rank 1 to take x0 (on its wire: xchg x1>0 x2<2)",
        "  rank 1: y2=mm(x2) waits for x2",
        "  rank 1: xchg x1>0 x2<2 waits for rank 0 to take x1 (on its wire: xchg x0>1 x2<2)"
        " and for rank 2 to send x2 (on its wire: xchg x2>0 x1<1)",
        "  rank 2: y0=mm(x0) waits for x0",
        "  rank 2: xchg x2>0 x1<1 waits for rank 1 to send x1 (on its wire: xchg x1>0 x2<2)",
        f"> rank 0: {AHEAD.replace('y2=mm(x2)', '>>y2=mm(x2)<<')}",
        f"  rank 1: {BACK}",
        f"  rank 2: {POSTED}",
    ]
    right = "xchg x1>2 x0<0 | y0=mm(x0) | xchg x1>0 x2<2 | y2=mm(x2) | y1=mm(x1)"
    verify(parse("all_gather_matmul", THREE, AHEAD, right, POSTED))


def test_crossing_rounds_hang_although_everything_is_posted():
    programs = [
        "xchg x0>1 x1<1 | xchg x0>2 x2<2 | y0=mm(x0) | y1=mm(x1) | y2=mm(x2)",
        "xchg x1>2 x2<2 | xchg x1>0 x0<0 | y0=mm(x0) | y1=mm(x1) | y2=mm(x2)",
        "xchg x2>0 x0<0 | xchg x2>1 x1<1 | y0=mm(x0) | y1=mm(x1) | y2=mm(x2)",
    ]
    error = refused(parse("all_gather_matmul", THREE, *programs))
    assert "rank 1: xchg x1>2 x2<2 waits for rank 2 to take x1 (on its wire: xchg x2>0 x0<0)" in str(error)
    assert "rank 0: xchg x0>1 x1<1 waits" in str(error)
    programs[0] = "xchg x0>2 x2<2 | xchg x0>1 x1<1 | y0=mm(x0) | y1=mm(x1) | y2=mm(x2)"
    verify(parse("all_gather_matmul", THREE, *programs))  # pairs, one after another


def test_a_later_round_does_not_complete_an_earlier_half():
    # Rank 0 sends x0 twice to rank 1, whose first exchange is still out on the side of rank 2.
    programs = [
        "xchg x0>1 x1<1 | xchg x0>1 x2<2 | y0=mm(x0) | y1=mm(x1) | y2=mm(x2)",
        "xchg x1>0 x0<0 | y0=mm(x0) | y1=mm(x1) | xchg x1>2 x2<2 | y2=mm(x2)",
        "xchg x2>0 x1<1 | xchg x2>1 x0<0 | y0=mm(x0) | y1=mm(x1) | y2=mm(x2)",
    ]
    assert "deadlock" in str(refused(parse("all_gather_matmul", THREE, *programs)))
    # Three splits on three ranks: a rank that is a round ahead finds its partner in the round before.
    verify(build("all_gather_matmul", [3, 3, 3], splits=3))


TWO = "x0=1x1 x1=1x1 y0=1x1 y1=1x1"
SWAP0, SWAP1 = "xchg x0>1 x1<1 | y0=mm(x0) | y1=mm(x1)", "xchg x1>0 x0<0 | y1=mm(x1) | y0=mm(x0)"


@pytest.mark.parametrize(
    ("program", "message", "index"),
    [
        (f"{SWAP1} | xchg y1>0 y9<0", "buffer 'y9' of all_gather_matmul has no size", 3),
        (f"{SWAP1} | xchg x1>0 x0@0<0", "xchg x1>0 x0@0<0 waits for rank 0 to take x1 (on its wire: nothing)", 3),
        ("xchg x1>1 x0<0 | y1=mm(x1) | y0=mm(x0)", "xchg x1>1 x0<0 must name other ranks below 2", 0),
        ("xchg x1>0 x0<2 | y1=mm(x1) | y0=mm(x0)", "xchg x1>0 x0<2 must name other ranks below 2", 0),
        ("y0=mm(x0) | xchg x1>0 x0<0 | y1=mm(x1)", "y0=mm(x0) reads x0, which nothing has filled", 0),
        ("xchg y1>0 x0<0 | y1=mm(x1) | y0=mm(x0)", "xchg y1>0 x0<0 reads y1, which nothing has filled", 0),
        (f"{SWAP1} | y1=mm(x1)", "y1=mm(x1) overwrites y1, which holds mm@1(x1@1)", 3),
        (f"{SWAP1} | x1=mm(x0)+x1", "x1=mm(x0)+x1 overwrites x1, which is in flight", 3),
        ("xchg x1>0 x0<0 | x0=mm(x1) | y1=mm(x1) | y0=mm(x0)", "x0=mm(x1) overwrites x0, which is in flight", 1),
        (f"{SWAP1} | y1=y1+y0", "y1 on rank 1: extra mm@1(x0@0)", 3),
        ("xchg x1>0 x0<0 | y1=mm(x0) | y0=mm(x1)", "y0 on rank 1: missing mm@1(x0@0); extra mm@1(x1@1)", 2),
        ("xchg x1>0 x0<0 | y1=mm(x1)", "y0 on rank 1: nothing writes it; missing mm@1(x0@0)", 2),
        (f"{SWAP1} | y0@7=mm(x0)", "y0@7 is computed for nothing: no output, and nobody reads it", 3),
        (f"{SWAP1} | y0@7,y0@8=mm(x0)", "writes 2 buffers, so it must read as many and add none", 3),
        (f"{SWAP1} | y0@7,y0@7=mm(x0,x1)", "writes a buffer twice", 3),
    ],
)
def test_what_is_wrong_is_said_and_marked(program, message, index):
    verify(parse("all_gather_matmul", TWO, SWAP0, SWAP1))
    error = refused(parse("all_gather_matmul", TWO, SWAP0, program))
    assert message in str(error)
    assert (error.rank, error.index) == (1, index)
    marked = [line for line in str(error).splitlines() if line.startswith("> rank 1: ")]
    assert len(marked) == 1
    assert ">>" in marked[0]


REDUCE = [
    "p1=mm(h1) | xchg p1>1 p0@1<1 | z0=mm(h0) | z0=z0+p0@1",
    "p0=mm(h0) | xchg p0>0 p1@0<0 | z1=mm(h1) | z1=z1+p1@0",
]
HALVES = "h0=1x1 h1=1x1 p0=1x10 p1=1x10 z0=1x10 z1=1x10"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("p0=mm(h0) | xchg p0>0 p1@0<0 | z1=mm(h1)", "z1 on rank 1: missing mm@0(h1@0)"),
        ("p0=mm(h0) | xchg p0>0 p1@0<0 | z1=mm(h1) | z1=z1+p1@0+p1@0", "z1 on rank 1: extra mm@0(h1@0)"),
        ("p0=mm(h0) | xchg p0>0 p1@0<0 | z1=p1@0+p1@0", "z1 on rank 1: missing mm@1(h1@1); extra mm@0(h1@0)"),
        ("p0=mm(h1) | xchg p0>0 p1@0<0 | z1=mm(h1) | z1=z1+p1@0", "z0 on rank 0: missing mm@1(h0@1); extra mm@1(h1@1)"),
        ("xchg h0>0 p1@0<0 | z1=mm(h1) | z1=z1+p1@0", "p0@1 takes Size(rows=1, row_bytes=10), and rank 1 gives h0 of"),
        ("p0=mm(h0) | xchg p0>0 p1@0<0 | z1=mm(h1) | z1=z1+p1@0 | z0=mm(h0)", "z0 is computed for nothing"),
    ],
)
def test_lost_and_doubled_terms(program, message):
    verify(parse("matmul_reduce_scatter", HALVES, *REDUCE))
    assert message in str(refused(parse("matmul_reduce_scatter", HALVES, REDUCE[0], program)))


def test_what_is_received_must_be_used():
    programs = ["xchg h0>1 h0@1<1 | z0=mm(h0)", "xchg h0>0 h0@0<0 | z1=mm(h1)"]
    error = refused(parse("matmul_reduce_scatter-z", HALVES, programs[0][:16], programs[1][:16]))
    assert "rank 0, operation 0: h0@1 is moved for nothing" in str(error)


def test_sums_need_equal_rows():
    schedule = parse("matmul_reduce_scatter", HALVES.replace("z1=1x10", "z1=2x10"), *REDUCE)
    assert "sums unequal rows: z1 has 2, z1 has 2, p1@0 has 1" in str(refused(schedule))


def test_a_weight_gradient_waits_for_the_kernels_before_it():
    ops = ["h0=down(x0)", "p0=up(h0)", "v=wgrad_down(x0)", "w=wgrad_up(g0)", "z0=p0"]
    sizes = "x0=1x1 g0=1x1 h0=1x1 p0=1x1 z0=1x1 v=1x1 w=1x1"
    verify(parse("mlp_backward", sizes, " | ".join(ops)))
    early = " | ".join([ops[3], *ops[:3], ops[4]])
    assert "w=wgrad_up(g0) reads h0, which nothing has filled" in str(refused(parse("mlp_backward", sizes, early)))


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        (("all_gather x0 -> x0 x1", ""), "all_gather x0 -> x0 x1 waits for ranks [1] to come to a collective"),
        (("all_gather x0 -> x0 x1", "xchg x1>0 x0<0"), "waits for ranks [1] to come to a collective"),
        (("all_gather x0 -> x0 x1", "all_reduce x1 -> x0"), "rank 0 has come to all_gather"),
        (("all_gather x0 -> x0 x1", "all_gather x1 -> x1 x0"), "overwrites x1, which holds x1@1"),
        (("all_gather x0 -> x0", "all_gather x1 -> x1"), "must read 1 and write 2 buffers on 2 ranks"),
        (("reduce_scatter x0 -> x1", "reduce_scatter x1 -> x0"), "must read 2 and write 1 buffers on 2 ranks"),
        (("all_reduce x0 -> y0 y1", "all_reduce x1 -> y0 y1"), "must read 1 and write 1 buffers on 2 ranks"),
        (("all_to_all x0 -> y0 y1", "all_to_all x1 -> y0 y1"), "must read 2 and write 2 buffers on 2 ranks"),
        (("all_reduce x0 -> y0", "all_reduce x1 -> y1"), "y0 on rank 0: missing mm@0(x0@0); extra x0@0 + x1@1"),
    ],
)
def test_collectives(programs, message):
    text = str(refused(parse("all_gather_matmul", TWO, *(program or "y1=mm(x1)" for program in programs))))
    assert message.replace(" + ", ", ") in text


def test_collectives_agree_on_sizes_and_kinds():
    sizes = TWO.replace("x1=1x1", "x1=2x1")
    programs = ("all_gather x0 -> y1 x1 | y0=mm(x0)", "all_gather x1 -> x0 x1 | y1=mm(x1)")
    message = "y1 takes Size(rows=1, row_bytes=1), and rank 0 gives x0 of"
    wrong = parse("all_gather_matmul", sizes.replace("x0=1x1", "x0=3x1"), *programs)
    assert message in str(refused(wrong))
    unknown = Schedule("all_gather_matmul", ((Collective("gossip", ("x0",), ("x1",)),), ()), wrong.sizes)
    assert "unknown collective 'gossip'; known: all_gather" in str(refused(unknown))


@pytest.mark.parametrize("op", ["mine", "mlp-q", "all_to_al"])
def test_an_operator_without_a_flow(op):
    assert f"cannot verify '{op}'" in str(refused(parse(op, TWO, "", "")))


@pytest.mark.parametrize(
    "sizes", ["x0=1x1", "x0=1x1 x1.0=1x1 x1.2=1x1", "x0=1x1 x1=1x1 x1.0=1x1", "x0=1x1 x1=1x1 x2=1x1"]
)
def test_sizes_that_name_no_pieces(sizes):
    assert "the sizes do not say how x" in str(refused(parse("all_gather_matmul", sizes, "", "")))


@pytest.mark.parametrize(
    "op", [Compute("mm", ("x0",), ()), Compute("", ("x0",), ("y0",), ("x0",)), Compute("", (), ("y0",))]
)
def test_malformed_computes(op):
    schedule = parse("all_gather_matmul", TWO, "", "")
    assert refused(replace(schedule, programs=((op,), ()))).rank == 0


def test_errors_on_many_ranks_stay_readable():
    schedule = build("mlp", [1] * 32)
    text = str(refused(mutant(schedule, 5, schedule.programs[5][:-1])))
    assert "z5 on rank 5: missing down@0(up@0(x5@5)), down@1(up@1(x5@5))" in text
    assert "and 23 more" in text
    wrong = str(refused(mutant(schedule, 5, schedule.programs[5][1:])))
    assert len(wrong.splitlines()) < 30


# --- memory -----------------------------------------------------------------------------------------------------------


def test_peak_bytes_of_a_gather():
    # x0 is sent and stays (6), x1 is there from its post (6), y0 and y1 are outputs (10 each): all at once at the end
    proof = verify(build("all_gather_matmul", [2, 2], row_bytes={"x": 3, "y": 5}))
    assert proof.peak_bytes == (32, 32)
    assert proof.wire_bytes == (6, 6)
    assert (proof.exchanges, proof.collectives) == (2, 0)


def test_peak_bytes_of_a_scatter():
    # h0 h1 p1 | h0 p1 p0@1 | h0 p1 p0@1 z0 | p1 p0@1 z0
    assert verify(parse("matmul_reduce_scatter", HALVES, *REDUCE)).peak_bytes == (31, 31)
    # with wide inputs the first operation is the fullest: 100 + 100 + 1
    assert verify(build("matmul_reduce_scatter", [1, 1], row_bytes={"h": 100})).peak_bytes == (201, 201)


def test_peak_bytes_of_uneven_pieces():
    # rank 0: h0 h1 p1 = 5+1+1, then h0 p1 p0@1 z0 = 5+1+5+5; rank 1: h0 h1 p0 = 5+1+5, then h1 p0 p1@0 z1 = 1+5+1+1
    assert verify(build("matmul_reduce_scatter", [5, 1])).peak_bytes == (16, 11)


def test_peak_bytes_of_collectives_and_idle_inputs():
    # x0 and x1 gathered in place, y0 and y1 written
    assert verify(build("all_gather_matmul", [2, 3], pattern="collective", row_bytes={"y": 10})).peak_bytes == (55, 55)
    assert verify(build("all_gather_matmul-y", [2, 3])).peak_bytes == (0, 0)
    # a weight gradient needs its local side, which the schedule does not name: h lives until then
    assert verify(build("column_backward_saved-z", [2], row_bytes={"h": 7, "w": 5})).peak_bytes == (19,)
