import pytest

from flashoverlap.all_to_all import all_to_all
from flashoverlap.flow import ALL_TO_ALLS, FLOWS
from flashoverlap.machine import Kernel, Link, Machine
from flashoverlap.patterns import build
from flashoverlap.rounds import partners
from flashoverlap.schedule import Exchange, ScheduleError
from flashoverlap.simulate import simulate
from flashoverlap.verify import verify

LAYOUTS = [(n, nodes) for n in (1, 2, 3, 4, 6, 8, 9, 12, 16) for nodes in range(1, n + 1) if n % nodes == 0]


def leaving(n, nodes):
    """How many ranks of each node send out of it, by round."""
    size = n // nodes
    rounds = zip(*(partners(n, rank, nodes) for rank in range(n)), strict=True)
    return [
        [
            sum(to // size != rank // size for rank, (to, _) in enumerate(round) if rank // size == node)
            for node in range(nodes)
        ]
        for round in rounds
    ]


@pytest.mark.parametrize(("n", "nodes"), LAYOUTS)
def test_every_round_is_a_permutation_and_every_pair_meets_once(n, nodes):
    of_rank = [partners(n, rank, nodes) for rank in range(n)]
    for round in zip(*of_rank, strict=True):
        assert sorted(to for to, _ in round) == list(range(n))
        assert all(round[to][1] == rank != to for rank, (to, _) in enumerate(round))
    for rank, rounds in enumerate(of_rank):
        assert sorted(to for to, _ in rounds) == [other for other in range(n) if other != rank]


def test_rounds_of_two_nodes_of_four():
    assert leaving(8, 1) == [[0]] * 7
    in_rank_order = [sum(to // 4 != rank // 4 for rank in range(4) for to in [(rank + d) % 8]) for d in range(1, 8)]
    assert in_rank_order == [1, 2, 3, 4, 3, 2, 1]
    assert leaving(8, 2) == [[2, 2]] * 3 + [[4, 4]] + [[2, 2]] * 3


@pytest.mark.parametrize(("n", "nodes"), [(n, nodes) for n, nodes in LAYOUTS if 1 < nodes < n])
def test_but_for_the_rounds_of_equal_places_all_are_as_even_as_whole_numbers_allow(n, nodes):
    size, rounds = n // nodes, leaving(n, nodes)
    assert all(len(set(of_nodes)) == 1 for of_nodes in rounds)  # every node is as busy as every other
    mixed = [of_nodes[0] for of_nodes in rounds]
    for _ in range(nodes - 1):
        mixed.remove(size)  # ranks of the same place: all leave
    inside = [size - out for out in mixed]
    assert max(inside) - min(inside) <= 1


@pytest.mark.parametrize("op", FLOWS)
@pytest.mark.parametrize("pattern", ["direct", "sliced"])
@pytest.mark.parametrize(("n", "nodes", "splits"), [(4, 2, 2), (6, 3, 1), (6, 2, 1), (8, 2, 1)])
def test_spread_schedules_are_right(op, pattern, n, nodes, splits):
    for rows in ([2] * n, [rank % 3 for rank in range(n)]):
        proof = verify(build(op, rows, pattern=pattern, splits=splits, nodes=nodes))
        assert proof.wire_bytes == verify(build(op, rows, pattern=pattern, splits=splits)).wire_bytes


@pytest.mark.parametrize("op", ALL_TO_ALLS)
@pytest.mark.parametrize("pattern", ["direct", "sliced"])
@pytest.mark.parametrize(("n", "nodes", "splits"), [(4, 2, 2), (6, 3, 1), (6, 2, 1), (8, 2, 1)])
def test_spread_all_to_alls_are_right(op, pattern, n, nodes, splits):
    spread, in_order = (
        all_to_all(
            [[3] * n] * n, op=op, pattern=pattern, splits=splits, tensors=2 if op == "all_to_all" else 1, nodes=each
        )
        for each in (nodes, 1)
    )
    assert verify(spread).wire_bytes == verify(in_order).wire_bytes
    firsts = [[op.to for op in spread.programs[rank] if isinstance(op, Exchange)] for rank in range(n)]
    order = [to for to, _ in partners(n, 1, nodes)]
    assert list(dict.fromkeys(firsts[1])) == order


def test_an_all_to_all_over_two_nodes_is_faster_where_its_rounds_are_spread():
    machine = Machine(Link(0.0, 64.0), {"mm": Kernel()}, nodes=(8, 8), uplink=Link(0.0, 256.0))
    seconds = [
        simulate(all_to_all([[64] * 16] * 16, op="all_to_all_matmul", nodes=nodes), machine, spans=False).makespan_s
        for nodes in (1, 2)
    ]
    assert seconds[1] < 0.9 * seconds[0]


def test_alike_ranks_of_a_spread_all_to_all_stand_for_all():
    machine = Machine(Link(1e-3, 64.0), {"mm": Kernel(0.5)}, nodes=(4, 4), uplink=Link(2e-3, 128.0))
    schedule = all_to_all([[16] * 8] * 8, op="all_to_all_matmul", nodes=2)
    assert simulate(schedule, machine, spans=False).makespan_s == simulate(schedule, machine).makespan_s


def test_nodes_must_be_of_equal_size():
    with pytest.raises(ScheduleError, match="all_to_all on 6 ranks cannot be spread over 4 nodes of equal size"):
        all_to_all([[1] * 6] * 6, nodes=4)
    with pytest.raises(ScheduleError, match="mlp on 6 ranks cannot be spread over 4 nodes of equal size"):
        build("mlp", [1] * 6, nodes=4)
    with pytest.raises(ValueError, match="6 ranks are no whole number of ranks for each of 4 nodes"):
        partners(6, 0, 4)
