"""Wires that ranks share, and wires that are not alike, in the simulator."""

from dataclasses import replace

import pytest

from flashoverlap.machine import Kernel, Link, Machine
from flashoverlap.patterns import build
from flashoverlap.schedule import Schedule
from flashoverlap.simulate import simulate
from flashoverlap.wire_bound import least_wire_seconds

FREE = {"mm": Kernel(), "up": Kernel(), "down": Kernel()}
FOUR = Machine(Link(0.0, 1.0), FREE, nodes=(2, 2), uplink=Link(0.0, 1.0))


def hand(*programs):
    sizes = "size a=4x1 b=4x1 c=8x1 d=8x1"
    lines = [f"rank {rank}: {program}" for rank, program in enumerate(programs)]
    return Schedule.parse("\n".join([f"schedule hand ranks={len(programs)}", sizes, *lines]))


def transfers(schedule, on):
    spans = simulate(schedule, on).spans
    return {(s.rank, s.name): (s.start_s, s.end_s) for s in spans if s.track == "send"}


def test_transfers_between_nodes_divide_the_uplink_and_those_inside_do_not():
    pairs = hand("xchg a>2 b<2", "xchg c>3 d<3", "xchg b>0 a<0", "xchg d>1 c<1")
    found = transfers(pairs, FOUR)
    # both at half the pace until a is through at 8 with 4 bytes of c left, which then go alone
    assert found[0, "a"] == (0, 8)
    assert found[1, "c"] == (0, 12)
    inside = hand("xchg a>1 b<1", "xchg b>0 a<0", "xchg c>3 d<3", "xchg d>2 c<2")
    assert transfers(inside, FOUR)[0, "a"] == (0, 4)
    assert transfers(inside, FOUR)[2, "c"] == (0, 8)


def test_an_uplink_that_carries_several_at_full_pace_slows_nothing():
    pairs = hand("xchg a>2 b<2", "xchg c>3 d<3", "xchg b>0 a<0", "xchg d>1 c<1")
    wide = replace(FOUR, uplink=Link(0.0, 2.0))
    assert transfers(pairs, wide) == transfers(pairs, replace(FOUR, uplink=None))


def test_what_comes_to_one_node_from_several_divides_its_uplink():
    on = replace(FOUR, nodes=(1, 1, 2))
    into = transfers(hand("xchg a>2 b<2", "xchg a>3 b<3", "xchg b>0 a<0", "xchg b>1 a<1"), on)
    assert into[0, "a"] == into[1, "a"] == (0, 8)  # alone out of their nodes, two into the third


def test_the_latency_of_an_uplink_is_not_divided():
    pairs = hand("xchg a>2 b<2", "xchg a>3 b<3", "xchg b>0 a<0", "xchg b>1 a<1")
    found = transfers(pairs, replace(FOUR, uplink=Link(5.0, 1.0)))
    assert set(found.values()) == {(0, 13)}


@pytest.mark.parametrize(("nodes", "size"), [(2, 4), (2, 8), (4, 8)])
def test_spread_rounds_reach_the_bound_of_the_wires_where_rank_order_does_not(nodes, size):
    n = nodes * size
    on = Machine(Link(0.0, 64.0), FREE, nodes=(size,) * nodes, uplink=Link(0.0, 64.0 * size / 2))
    crossing = size * (n - size) * 64  # bytes that leave a node, when every piece goes straight
    for op, times in (("all_gather_matmul", 1), ("matmul_reduce_scatter", 1), ("mlp", 2)):
        spread = simulate(build(op, [64] * n, nodes=nodes), on, spans=False).makespan_s
        in_order = simulate(build(op, [64] * n), on, spans=False).makespan_s
        assert spread == pytest.approx(times * crossing / (64.0 * size / 2))
        assert in_order > 1.06 * spread


def test_the_least_of_the_wires_is_never_beaten():
    for size, over in ((2, 1.0), (4, 2.0), (4, 0.3)):
        on = Machine(Link(0.0, 64.0), FREE, nodes=(size,) * 2, uplink=Link(0.0, 64.0 * over))
        for op in ("all_gather_matmul", "matmul_reduce_scatter", "mlp", "all_reduce"):
            least = least_wire_seconds(build(op, [64] * 2 * size), on)
            for pattern, nodes in (("direct", 1), ("direct", 2), ("ring", 1), ("collective", 1), ("sliced", 2)):
                schedule = build(op, [64] * 2 * size, pattern=pattern, nodes=nodes)
                assert simulate(schedule, on, spans=False).makespan_s >= least * (1 - 1e-9)


def test_the_least_of_the_wires_in_numbers():
    flat = Machine(Link(9.0, 64.0), FREE)
    gather, mlp = build("all_gather_matmul", [64] * 4), build("mlp", [64] * 4)
    assert least_wire_seconds(gather, flat) == pytest.approx(3.0)
    assert least_wire_seconds(gather, replace(flat, ports=2)) == pytest.approx(1.5)
    assert least_wire_seconds(mlp, flat) == pytest.approx(6.0)
    slow = replace(flat, links=(flat.link,) * 3 + (Link(0.0, 16.0),))
    assert least_wire_seconds(gather, slow) == pytest.approx(12.0)
    # two pieces have to come to each node once, though four transfers bring them
    assert least_wire_seconds(gather, replace(flat, nodes=(2, 2), uplink=Link(0.0, 8.0))) == pytest.approx(16.0)
    assert least_wire_seconds(build("mlp", [64]), flat) == 0.0


def test_a_slow_rank_holds_up_those_that_exchange_with_it():
    slow = Machine(Link(0.0, 1.0), FREE, links=(Link(0.0, 1.0), Link(0.0, 1.0), Link(0.0, 0.25)))
    found = transfers(hand("xchg a>1 b<1", "xchg b>0 a<0 | xchg a@0>2 b@0<2", "xchg b@0>1 a@0<1"), slow)
    assert found[0, "a"] == (0, 4)
    assert found[1, "a@0"] == (4, 20)


def test_a_burst_passes_at_once_after_a_pause_and_not_in_a_stream():
    first, second = (
        "xchg a>1 b<1 | xchg c>1 d<1 | z=mm(d) | xchg a>1 b<1",
        "xchg b>0 a<0 | xchg d>0 c<0 | z=mm(c) | xchg b>0 a<0",
    )
    on = Machine(Link(0.0, 1.0, burst_bytes=3), {"mm": Kernel(100.0)})
    schedule = hand(first, second)
    sent = [(s.start_s, s.end_s) for s in simulate(schedule, on).spans if (s.rank, s.track) == (0, "send")]
    assert sent == [(0, 1), (1, 9), (109, 110)]  # 3 of 4 bytes at once, then a stream, then 3 of 4 at once again


def test_a_machine_of_other_ranks_is_refused():
    with pytest.raises(ValueError, match="the nodes hold 4 ranks, and there are 3"):
        simulate(build("mlp", [1] * 3), FOUR)
