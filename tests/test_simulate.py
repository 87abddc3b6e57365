from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flashoverlap import patterns
from flashoverlap.all_to_all import all_to_all
from flashoverlap.flow import FLOWS
from flashoverlap.machine import Kernel, Link, Machine
from flashoverlap.schedule import Compute, Exchange, Schedule, ScheduleError
from flashoverlap.simulate import simulate
from flashoverlap.trace import Trace, exposed_seconds

ROWS = 64
NAMES = ("mm", "up", "down", "wgrad", "wgrad_up", "wgrad_down")


def machine(c, d, *, latency_s=0.0, **options):
    """A machine on which a piece of ROWS rows of one byte takes ``c`` to compute and ``d`` to move."""
    kernels = {name: Kernel(0.0, c / ROWS) for name in NAMES}
    return Machine(Link(latency_s, ROWS / d), kernels, **options)


def seconds(schedule, on):
    """Makespan, after a check that a trace with spans and one without say the same, and that the spans are sound."""
    trace, totals = simulate(schedule, on), simulate(schedule, on, spans=False)
    assert totals == replace(trace, spans=())
    for told, counted in zip(trace.totals, Trace.of(trace.spans, trace.ranks).totals, strict=True):
        assert told.compute_s == pytest.approx(counted.compute_s)
        assert told.blocked_s == pytest.approx(counted.blocked_s)
    if on.ports == 1:
        for track in ("compute", "blocked", "send", "recv"):
            for rank in range(trace.ranks):
                spans = [span for span in trace.spans if (span.rank, span.track) == (rank, track)]
                assert trace.busy_s(rank, track) == pytest.approx(sum(span.end_s - span.start_s for span in spans))
    return trace.makespan_s


# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [patterns.all_gather_matmul, patterns.matmul_reduce_scatter])
@pytest.mark.parametrize("pattern", ["direct", "ring"])
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("c", "d"), [(1.0, 0.25), (1.0, 1.0), (1.0, 1.5), (0.1, 3.0)])
def test_one_layer(build, pattern, splits, n, c, d):
    """A transfer no longer than a piece is hidden; a longer one leaves the wire busy but for one split."""
    schedule, on = build([ROWS] * n, pattern=pattern, splits=splits), machine(c, d)
    expected = max(n * c, (n - 1) * d + c / splits)
    assert seconds(schedule, on) == pytest.approx(expected)
    trace = simulate(schedule, on)
    assert [trace.compute_s(rank) for rank in range(n)] == pytest.approx([n * c] * n)
    assert exposed_seconds(trace) == pytest.approx(expected - n * c)
    assert [trace.blocked_s(rank) for rank in range(n)] == pytest.approx([expected - n * c] * n)


@pytest.mark.parametrize("build", [patterns.all_gather_matmul, patterns.matmul_reduce_scatter])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize(("c", "d"), [(1.0, 0.25), (1.0, 1.0), (0.1, 3.0)])
def test_slices_leave_a_tail_and_one_slice_overlaps_nothing(build, n, c, d):
    compute, wire = n * c, (n - 1) * d
    assert seconds(build([ROWS] * n, pattern="sliced"), machine(c, d)) == pytest.approx(compute + wire)
    for slices in (2, 4, 8):
        u, w = compute / slices, wire / slices
        time = seconds(build([ROWS] * n, pattern="sliced", splits=slices), machine(c, d))
        assert time == pytest.approx(w + u + (slices - 1) * max(u, w))


@pytest.mark.parametrize(
    ("op", "rounds", "kernels"),
    [("all_gather_matmul", 1, 1), ("matmul_reduce_scatter", 1, 1), ("all_reduce", 2, 1), ("mlp", 2, 2)],
)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_collectives_overlap_nothing(op, rounds, kernels, n):
    on = machine(1.0, 0.5, latency_s=0.01, collective_efficiency=0.8)
    schedule = patterns.build(op, [ROWS] * n, pattern="collective")
    assert seconds(schedule, on) == pytest.approx(kernels * n * 1.0 + rounds * (n - 1) * (0.01 + 0.5 / 0.8))
    assert (
        sum(span.bytes for span in simulate(schedule, on).spans if span.track == "send") == rounds * n * (n - 1) * ROWS
    )


def test_a_collective_costs_something_however_little_it_moves():
    base = machine(1.0, 0.5, latency_s=0.01)
    for op, parts in (("all_gather_matmul", 1), ("all_reduce", 2)):
        schedule = patterns.build(op, [ROWS] * 3, pattern="collective")
        more_s = seconds(schedule, replace(base, collective_fixed_s=0.25)) - seconds(schedule, base)
        assert more_s == pytest.approx(parts * 0.25)
    alone = patterns.build("all_reduce", [ROWS], pattern="collective")
    assert seconds(alone, replace(base, collective_fixed_s=0.25)) == seconds(alone, base)


def test_a_burst_of_the_sender_does_not_hurry_a_slower_receiver():
    links = (Link(0.0, 100.0, (), 50), Link(0.0, 10.0))
    schedule = patterns.build("all_gather_matmul", [10] * 2, row_bytes={"x": 10})
    assert simulate(schedule, Machine(links[0], {"mm": Kernel()}, links=links)).makespan_s == pytest.approx(10.0)


def test_a_collective_all_to_all_moves_all_but_the_own_block():
    blocks = [[ROWS] * 3] * 3
    schedule, on = all_to_all(blocks, pattern="collective"), machine(1.0, 0.5, latency_s=0.01)
    assert seconds(schedule, on) == pytest.approx(3.0 + 2 * (0.01 + 0.5))
    assert seconds(all_to_all(blocks), machine(1.0, 0.5)) == pytest.approx(3.0)
    assert seconds(all_to_all(blocks, pattern="sliced"), machine(1.0, 0.5)) == pytest.approx(3.0 + 2 * 0.5)


def test_a_collective_takes_as_long_as_the_rank_with_most_to_move():
    schedule = patterns.all_gather_matmul([ROWS, 0, 3 * ROWS], pattern="collective")
    assert seconds(schedule, machine(0.0, 0.5)) == pytest.approx(4 * 0.5)  # rank 1 receives all four pieces


def test_contention_slows_a_kernel_only_while_the_wire_is_busy():
    for n, q, d in ((2, 0.5, 0.5), (4, 0.5, 0.5), (8, 1.0, 0.25), (2, 0.25, 1.25)):
        schedule = patterns.all_gather_matmul([ROWS] * n)
        on = machine(1.0, d, contention=q)
        assert seconds(schedule, on) == pytest.approx(n * 1.0 + (n - 1) * d * q / (1 + q))
        assert exposed_seconds(simulate(schedule, on)) == pytest.approx(0.0)
        assert exposed_seconds(simulate(schedule, on), n * 1.0) == pytest.approx((n - 1) * d * q / (1 + q))
    assert seconds(patterns.all_gather_matmul([ROWS] * 2), machine(1.0, 3.0, contention=0.5)) == pytest.approx(4.0)
    off = patterns.all_gather_matmul([ROWS] * 2, pattern="sliced")
    assert seconds(off, machine(1.0, 3.0, contention=0.5)) == pytest.approx(5.0)  # nothing computes beside a transfer
    collective = Schedule.parse(
        "schedule beside ranks=2\nsize x0=64x1 x1=64x1 h=64x1\n"
        "rank 0: all_gather x0 -> x0 x1 | y=mm(h)\nrank 1: all_gather x1 -> x0 x1 | y=mm(h)"
    )
    assert seconds(collective, machine(1.0, 0.5, contention=0.5)) == pytest.approx(1.0 + 0.5 / 3)


def test_several_ports_fly_several_transfers_at_once():
    schedule = patterns.all_gather_matmul([ROWS] * 5)
    for ports, rounds in ((1, 4), (2, 2), (4, 1), (9, 1)):
        last = 4 // rounds  # pieces that arrive in the last round
        assert seconds(schedule, machine(1.0, 50.0, ports=ports)) == pytest.approx(rounds * 50.0 + last)


def test_issuing_costs_the_program_every_time():
    schedule = patterns.all_gather_matmul([ROWS] * 3)
    assert seconds(schedule, machine(1.0, 0.5, issue_s=0.01)) == pytest.approx(5 * 0.01 + 3.0)
    waiting = machine(1.0, 4.0, issue_s=0.01)  # the second transfer follows the first, which left when it was issued
    assert seconds(schedule, waiting) == pytest.approx(0.01 + 8.0 + 1.0)


def test_additions_cost_what_the_machine_says():
    for n, splits in ((2, 1), (4, 1), (4, 2)):
        schedule = patterns.matmul_reduce_scatter([ROWS] * n, splits=splits)
        on = machine(1.0, 0.1, add=Kernel(0.01, 0.001))
        assert seconds(schedule, on) == pytest.approx(n * 1.0 + (n - 1) * (splits * 0.01 + ROWS * 0.001))


# --- the rules, on programs written by hand -----------------------------------------------------------------------------


def hand(*programs):
    sizes = "size a=1x1 b=2x1 c=4x1 d=8x1 long=100x1"
    lines = [f"rank {rank}: {program}" for rank, program in enumerate(programs)]
    return Schedule.parse("\n".join([f"schedule hand ranks={len(programs)}", sizes, *lines]))


def spans_of(schedule, **options):
    on = Machine(Link(0.0, 1.0), {"mm": Kernel(0.0, 1.0)}, **options)
    return {(s.rank, s.track, s.name): (s.start_s, s.end_s) for s in simulate(schedule, on).spans}


def test_a_transfer_waits_for_both_ranks_to_post_it():
    spans = spans_of(hand("xchg a>1 b<1 | y=mm(b)", "y=mm(c) | xchg b>0 a<0"))
    assert spans[0, "send", "a"] == spans[1, "recv", "a"] == (4, 5)
    assert spans[1, "send", "b"] == spans[0, "recv", "b"] == (4, 6)
    assert spans[0, "blocked", "b"] == (0, 6)
    assert spans[0, "compute", "mm y"] == (6, 8)


def test_transfers_leave_in_program_order_one_after_another():
    spans = spans_of(hand("xchg c>1 a<1 | xchg b>1 d<1", "xchg a>0 c<0 | xchg d>0 b<0"))
    assert spans[0, "send", "c"] == (0, 4)
    assert spans[0, "send", "b"] == (4, 6)
    assert spans[1, "send", "a"] == (0, 1)
    assert spans[1, "send", "d"] == (1, 9)  # the other direction does not wait
    assert spans[0, "blocked", "end"] == spans[1, "blocked", "end"] == (0, 9)


def test_a_busy_receiver_holds_the_sender_back():
    schedule = hand("xchg long>2 a<1 | xchg a>1 b<2", "xchg a>0 a<2 | xchg d>2 a@0<0", "xchg a>1 long<0 | xchg b>0 d<1")
    spans = spans_of(schedule)
    assert spans[1, "send", "d"] == (100, 108)  # rank 2's wire in is taken until then
    assert spans[0, "send", "a"] == (100, 101)


def test_what_is_handed_on_must_have_arrived_but_does_not_block_the_program():
    spans = spans_of(
        hand(
            "xchg c>1 a<2 | xchg d>1 b<2 | y=mm(long)",
            "xchg a>2 c<0 | xchg c>2 d<0 | y=mm(long)",
            "xchg a>0 a@1<1 | xchg b>0 c<1 | y=mm(long)",
        )
    )
    assert spans[1, "send", "a"] == (0, 1)
    assert spans[1, "recv", "c"] == (0, 4)
    assert spans[1, "send", "c"] == spans[2, "recv", "c"] == (4, 8)
    assert spans[1, "compute", "mm y"] == (0, 100)


def test_a_collective_waits_for_earlier_transfers_and_later_ones_wait_for_it():
    program = "xchg {0}>{1} {2}<{1} | all_reduce long -> long | xchg {2}>{1} {0}<{1}"
    spans = spans_of(hand(program.format("b", 1, "d"), program.format("d", 0, "b")))
    assert spans[0, "send", "b"] == (0, 2)
    assert spans[0, "send", "all_reduce"] == spans[1, "recv", "all_reduce"] == (8, 108)
    assert spans[0, "send", "d"] == (108, 116)


def test_a_buffer_received_twice_is_read_as_it_was_posted_last():
    spans = spans_of(hand("xchg a>1 c<1 | y=mm(c) | xchg a>1 c<1 | xchg a>1 c<1 | w=mm(c)", "xchg c>0 a<0 | " * 3))
    assert spans[0, "compute", "mm y"] == (4, 8)
    assert spans[0, "compute", "mm w"] == (16, 20)


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        (("xchg a>1 b<1 | y=mm(b)", "y=mm(a)"), "rank 0: a never leaves for rank 1: rank 1 has posted nothing more"),
        (("xchg a>1 b<1", "y=mm(a)"), ">>xchg a>1 b<1<<"),
        (
            ("xchg a>1 c<1", "xchg a>2 c<2", "xchg a>0 c<0"),
            "never leaves for rank 1: rank 1 next receives c from rank 2",
        ),
        (("xchg a>1 b<2", "xchg a>2 b<0", "xchg a>1 b<1"), "b never comes from rank 2: rank 2 next sends a to rank 1"),
        (("xchg a>1 b<1", "all_gather a -> b"), "rank 1 is at all_gather"),
        (
            ("y=mm(c) | z=mm(b) | xchg a>1 b<1", "xchg a>0 b<0 | xchg c>0 d<0 | y=mm(d) | xchg b>0 a<0"),
            "rank 1: c never",
        ),
        (("all_gather a -> a b", "y=mm(a)"), r"all_gather waits for ranks \[1\]"),
        (("all_gather a -> a b", "xchg a>0 b<0"), r"waits for ranks \[1\]"),
        (("all_gather a -> a b", "all_reduce a -> a"), "all_gather on rank 0 meets all_reduce on rank 1"),
        (("xchg a>2 b<1", "xchg b>0 a<0"), "xchg a>2 b<1 names a rank that is not one of 2"),
        (("xchg lost>1 a<1", "xchg a>0 b<0"), "buffer 'lost' of hand has no size"),
    ],
)
def test_a_schedule_that_cannot_finish_is_refused_with_the_place(programs, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(hand(*programs), machine(1.0, 1.0))


def test_an_unknown_kernel_is_refused_by_name():
    with pytest.raises(ValueError, match="no kernel 'gelu'; known: down, mm"):
        simulate(hand("y=gelu(a)"), machine(1.0, 1.0))


def test_no_ranks_and_empty_programs_take_no_time():
    assert simulate(Schedule("nothing", (), ()), machine(1.0, 1.0)).makespan_s == 0.0
    assert simulate(hand("", ""), machine(1.0, 1.0)).makespan_s == 0.0


# --- what simulators get wrong (aliyun/SimAI#22, NVIDIA/Megatron-LM#1001) ----------------------------------------------


@pytest.mark.parametrize("pattern", ["sliced", "direct"])
@pytest.mark.parametrize("build", [patterns.all_gather_matmul, patterns.matmul_reduce_scatter])
def test_chunks_cost_latency_so_that_the_best_count_is_interior(build, pattern):
    compute, wire, latency = 10e-3, 10e-3, 1e-3
    chunks = (1, 2, 4, 1000)
    on = Machine(Link(latency, 1000 / wire), {"mm": Kernel(0.0, compute / 2000)})
    times = {k: seconds(build([1000] * 2, pattern=pattern, splits=k), on) for k in chunks}
    for k, time in times.items():
        assert max(compute, wire) <= time <= compute + wire + k * latency + 1e-12
    if pattern == "sliced":
        assert times[1] == pytest.approx(compute + wire + latency)
    best = min(times, key=lambda k: times[k])
    assert best in chunks[1:-1]


@pytest.mark.parametrize("pattern", patterns.PATTERNS)
@pytest.mark.parametrize("op", FLOWS)
def test_one_rank_and_zero_bytes_cost_nothing(op, pattern):
    slow = machine(1.0, 1e9, latency_s=1e9)
    alone = simulate(patterns.build(op, [ROWS], pattern=pattern), slow)
    assert exposed_seconds(alone) == alone.makespan_s - alone.compute_s(0) == 0.0
    if not FLOWS[op].wgrads:
        assert simulate(patterns.build(op, [0] * 4, pattern=pattern), slow).makespan_s == 0.0


# --- properties of every schedule ---------------------------------------------------------------------------------------


@st.composite
def schedules(draw):
    pattern = draw(st.sampled_from(patterns.PATTERNS))
    splits = 1 if pattern == "collective" else draw(st.integers(1, 3))
    rows = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    if draw(st.booleans()):
        blocks = [[(row * (target + 1)) % 7 for target in range(len(rows))] for row in rows]
        return all_to_all(blocks, pattern=pattern, splits=splits)
    return patterns.build(draw(st.sampled_from(list(FLOWS))), rows, pattern=pattern, splits=splits)


machines = st.builds(
    Machine,
    st.builds(Link, st.sampled_from([0.0, 0.5]), st.sampled_from([0.3, 1.0, 4.0])),
    st.fixed_dictionaries(
        {name: st.builds(Kernel, st.sampled_from([0.0, 1.0]), st.sampled_from([0.1, 1.0])) for name in NAMES}
    ),
    add=st.sampled_from([Kernel(), Kernel(0.1, 0.1)]),
    ports=st.integers(1, 3),
    contention=st.sampled_from([0.0, 0.5]),
    issue_s=st.sampled_from([0.0, 0.01]),
    post_s=st.sampled_from([0.0, 0.02]),
    notice_s=st.sampled_from([0.0, 0.03]),
)


def relabelled(schedule, new):
    """The same schedule with rank r called ``new[r]``; buffers keep their names."""

    def renamed(op):
        return op._replace(to=new[op.to], frm=new[op.frm]) if isinstance(op, Exchange) else op

    programs = {new[rank]: tuple(map(renamed, program)) for rank, program in enumerate(schedule.programs)}
    return replace(schedule, programs=tuple(programs[rank] for rank in range(schedule.ranks)))


@settings(max_examples=150, deadline=None)
@given(schedules(), machines, st.randoms(use_true_random=False))
def test_the_numbering_of_ranks_does_not_matter(schedule, on, random):
    new = list(range(schedule.ranks))
    random.shuffle(new)
    seconds(schedule, on)
    before, after = (simulate(s, on, spans=False).totals for s in (schedule, relabelled(schedule, new)))
    for rank, totals in enumerate(before):
        assert after[new[rank]] == pytest.approx(totals)


@pytest.mark.parametrize("pattern", patterns.PATTERNS)
@pytest.mark.parametrize("op", FLOWS)
def test_all_ranks_of_an_even_schedule_are_alike(op, pattern):
    first, *others = simulate(patterns.build(op, [ROWS] * 4, pattern=pattern), machine(1.0, 0.7, contention=0.2)).totals
    for totals in others:
        assert totals == pytest.approx(first)


@settings(max_examples=100, deadline=None)
@given(schedules(), machines, st.floats(0.1, 10.0), st.floats(1.0, 10.0))
def test_a_faster_wire_never_takes_longer(schedule, on, bytes_per_s, factor):
    slow = replace(on, link=Link(on.link.latency_s, bytes_per_s), contention=0.0)
    fast = replace(slow, link=Link(on.link.latency_s, bytes_per_s * factor))
    assert simulate(schedule, fast).makespan_s <= simulate(schedule, slow).makespan_s * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(schedules(), machines)
def test_the_replay_agrees_with_the_plain_recurrence(schedule, on):
    assume(all(isinstance(op, Compute | Exchange) for program in schedule.programs for op in program))
    on = replace(on, ports=1, contention=0.0)
    assert [totals.end_s for totals in simulate(schedule, on).totals] == pytest.approx(recurrence(schedule, on))


def recurrence(schedule, on):
    """When each rank ends, by repeated passes over all that is known already: slow, and without a clock."""
    n = schedule.ranks
    at, clock, end = [0] * n, [0.0] * n, [0.0] * n
    posts = [[] for _ in range(n)]  # of each rank: (operation, when posted, index of the receive that it hands on)
    arrivals = [[] for _ in range(n)]
    last = [{} for _ in range(n)]  # buffer -> index of the receive that it comes from
    left, came = ([[] for _ in range(n)] for _ in range(2))  # when each send, and each receive, left the wire
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(schedule.programs):
            while at[rank] < len(program):
                op = program[at[rank]]
                if isinstance(op, Exchange):
                    clock[rank] += on.issue_s + on.post_s
                    posts[rank].append((op, clock[rank], last[rank].get(op.send)))
                    last[rank][op.recv] = len(posts[rank]) - 1
                else:
                    waits = [last[rank][name] for name in op.reads + op.adds if name in last[rank]]
                    if any(index >= len(arrivals[rank]) for index in waits):
                        break
                    clock[rank] = max([clock[rank] + on.issue_s, *(arrivals[rank][index] for index in waits)])
                    clock[rank] += sum(on.add.seconds(schedule.size(name).rows) for name in op.adds[not op.kernel :])
                    if op.kernel:
                        clock[rank] += on.kernel(op.kernel).seconds(sum(schedule.size(name).rows for name in op.reads))
                at[rank] += 1
                moved = True
        for rank in range(n):
            while len(left[rank]) < len(posts[rank]):
                op, posted, need = posts[rank][len(left[rank])]
                there = len(arrivals[op.to])
                if there == len(posts[op.to]) or posts[op.to][there][0].frm != rank:
                    break
                if need is not None and need >= len(arrivals[rank]):
                    break
                start = max([posted, posts[op.to][there][1], *left[rank][-1:], *came[op.to][-1:]])
                start = max(start, 0.0 if need is None else arrivals[rank][need])
                over = start + on.transfer_s(schedule.size(op.send).bytes)
                left[rank].append(over)
                came[op.to].append(over)
                over += on.notice_s
                arrivals[op.to].append(over)
                end[rank], end[op.to] = max(end[rank], over), max(end[op.to], over)
                moved = True
    return [max(pair) for pair in zip(clock, end, strict=True)]


# --- what the library stands on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0])
def test_a_whole_mlp_in_one_schedule_meets_the_bound(n, splits, ratio):
    """Without latency, ``max(compute, wire)`` at every ratio of the two; two schedules, a layer each, do not."""
    compute = 2 * n * 1.0
    on = machine(1.0, ratio * compute / (2 * (n - 1)))
    whole = seconds(patterns.mlp([ROWS] * n, splits=splits), on)
    assert whole == pytest.approx(max(compute, ratio * compute), rel=1e-9)
    by_layer = [patterns.all_gather_matmul([ROWS] * n), patterns.matmul_reduce_scatter([ROWS] * n)]
    layers = sum(seconds(layer, on) for layer in by_layer)
    expected = max(compute, ratio * compute + 2 * 1.0 if ratio * n > n - 1 else 0.0)
    assert layers == pytest.approx(expected)
    assert layers <= 1.5 * max(compute, ratio * compute) + 1e-9


def test_layer_by_layer_two_ranks_are_half_above_the_bound_where_compute_and_wire_are_equal():
    layers = [patterns.all_gather_matmul([ROWS] * 2), patterns.matmul_reduce_scatter([ROWS] * 2)]
    assert sum(seconds(layer, machine(1.0, 2.0)) for layer in layers) == pytest.approx(1.5 * 4.0)


def test_a_thousand_ranks():
    """A million exchanges beside a million computations; pytest's timeout is the guard."""
    n = 1024
    trace = simulate(patterns.all_gather_matmul([ROWS] * n), machine(1.0, 1.0), spans=False)
    assert trace.makespan_s == pytest.approx(n * 1.0)
    assert exposed_seconds(trace) == pytest.approx(0.0)
