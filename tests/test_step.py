"""A data-parallel step as one schedule: proved, drawn, and replayed against its bound."""

import re

import pytest

from flashoverlap import Kernel, Link, Machine, Schedule, ScheduleError, simulate, verify
from flashoverlap.alike import alike_after
from flashoverlap.schedule import Exchange
from flashoverlap.step import MODES, SHARDS, data_parallel_step


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_every_step_is_proved(shard, ranks, splits):
    layers = [[3] * ranks, [2 + rank for rank in range(ranks)], [5, *[0] * (ranks - 1)]]
    schedule = data_parallel_step(layers, shard=shard, splits=splits)
    proof = verify(schedule)
    words = {"none": 2, "gradients": 2, "parameters": 3}[shard]  # pieces that travel per layer, to each other rank
    assert proof.exchanges == words * len(layers) * splits * ranks * (ranks - 1)
    assert Schedule.parse(str(schedule)) == schedule


def test_a_step_with_a_term_too_few_or_too_many_is_not_proved():
    text = str(data_parallel_step([[2, 2], [2, 2]], shard="gradients"))
    for old, new in (("z1_0=z1_0+p1_0@1", "z1_0=z1_0"), ("y1_1=mm(x1_1)", "y1_1=mm(x1_0)")):
        assert old in text
        with pytest.raises(ScheduleError):
            verify(Schedule.parse(text.replace(old, new)))


def test_gradients_leave_before_the_own_block_is_computed_and_are_summed_behind_the_next():
    program = [str(op) for op in data_parallel_step([[1, 1], [1, 1]], shard="gradients").programs[0]]
    assert program == [
        "xchg x0_0>1 x0_1<1",
        "xchg x1_0>1 x1_1<1",
        "y0_0=mm(x0_0)",
        "y0_1=mm(x0_1)",
        "y1_0=mm(x1_0)",
        "y1_1=mm(x1_1)",
        "p1_1=wgrad(h1_1)",
        "xchg p1_1>1 p1_0@1<1",
        "z1_0=wgrad(h1_0)",
        "d1=dgrad(u1)",
        "p0_1=wgrad(h0_1)",
        "xchg p0_1>1 p0_0@1<1",
        "z0_0=wgrad(h0_0)",
        "z1_0=z1_0+p1_0@1",
        "d0=dgrad(u0)",
        "z0_0=z0_0+p0_0@1",
    ]


def test_parameters_are_gathered_one_layer_ahead():
    program = data_parallel_step([[1, 1]] * 3, shard="parameters").programs[0]
    sent = [op.send for op in program if isinstance(op, Exchange)]
    assert sent == ["x0_0", "x1_0", "x2_0", "p2_1", "u2_0", "u1_0", "p1_1", "u0_0", "p0_1"]


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_mode_is_proved(shard, mode, ranks):
    """Layers of unequal splits, the first of which needs no gradient of its input."""
    layers = [[3] * ranks, [2 + rank for rank in range(ranks)], [4] * ranks]
    schedule = data_parallel_step(layers, shard=shard, mode=mode, splits=[3, 1, 2], unchained=[0])
    proof = verify(schedule)
    moved = {"none": 2 * 3, "gradients": 2 * 3, "parameters": 3 * 3 - 1}[shard]
    if mode == "flash":
        moved = {"none": 2 * 6, "gradients": 2 * 6, "parameters": 3 * 6 - 3}[shard]
    assert proof.exchanges == (0 if mode == "collective" else moved * ranks * (ranks - 1))
    assert not any("d0" in str(op) for op in schedule.programs[0])


def test_off_computes_nothing_while_something_moves():
    program = [str(op) for op in data_parallel_step([[1, 1], [1, 1]], shard="gradients", mode="off").programs[0]]
    assert program == [
        "xchg x0_0>1 x0_1<1",
        "y0_0,y0_1=mm(x0_0,x0_1)",
        "xchg x1_0>1 x1_1<1",
        "y1_0,y1_1=mm(x1_0,x1_1)",
        "p1_1,z1_0=wgrad(h1_1,h1_0)",
        "d1=dgrad(u1)",
        "p0_1,z0_0=wgrad(h0_1,h0_0)",
        "d0=dgrad(u0)",
        "xchg p1_1>1 p1_0@1<1",
        "z1_0=z1_0+p1_0@1",
        "xchg p0_1>1 p0_0@1<1",
        "z0_0=z0_0+p0_0@1",
    ]


def test_slices_are_whole_and_leave_behind_the_next_layer():
    program = [str(op) for op in data_parallel_step([[1, 1], [1, 1]], shard="none", mode="slice").programs[0]]
    assert program == [
        "y0_0,y0_1=mm(x0_0,x0_1)",
        "y1_0,y1_1=mm(x1_0,x1_1)",
        "p1_1,z1_0=wgrad(h1_1,h1_0)",
        "d1=dgrad(u1)",
        "xchg p1_1>1 p1_0@1<1",
        "p0_1,z0_0=wgrad(h0_1,h0_0)",
        "d0=dgrad(u0)",
        "xchg p0_1>1 p0_0@1<1",
        "z1_0=z1_0+p1_0@1",
        "xchg z1_0>1 z1_1<1",
        "z0_0=z0_0+p0_0@1",
        "xchg z0_0>1 z0_1<1",
    ]


def test_parts_of_a_piece_leave_one_after_another():
    program = [str(op) for op in data_parallel_step([[2, 2]], shard="gradients", splits=2).programs[0]]
    assert program[-9:] == [
        "p0_1.0=wgrad(h0_1.0)",
        "xchg p0_1.0>1 p0_0.0@1<1",
        "z0_0.0=wgrad(h0_0.0)",
        "p0_1.1=wgrad(h0_1.1)",
        "xchg p0_1.1>1 p0_0.1@1<1",
        "z0_0.1=wgrad(h0_0.1)",
        "d0=dgrad(u0)",
        "z0_0.0=z0_0.0+p0_0.0@1",
        "z0_0.1=z0_0.1+p0_0.1@1",
    ]


def test_ranks_that_own_as_much_are_replayed_as_one():
    """Which gives the times of a replay of all."""
    kernel, splits = Kernel(1e-5, 1e-6), [2, 1, 1]
    machine = Machine(Link(1e-5, 1e6), dict.fromkeys(("mm", "dgrad", "wgrad"), kernel), contention=0.1, post_s=1e-6)
    for shard in SHARDS:
        for mode in MODES:
            schedule = data_parallel_step(
                [[4] * 4, [3] * 4, [8] * 4], shard=shard, mode=mode, splits=splits, row_bytes=64
            )
            assert alike_after(schedule, machine) == 1
            all_s = simulate(schedule, machine).makespan_s
            assert simulate(schedule, machine, spans=False).makespan_s == pytest.approx(all_s)


def makespan(shard, ratio, layers=16, splits=4):
    """Of a stack whose kernels take 1 s a layer, over the bound; ``ratio`` is that of wire to compute."""
    pieces = 3 if shard == "parameters" else 2
    kernel = Kernel(0.0, 1.0 / 1024)
    wire_s = ratio * 3 * layers / (pieces * layers)
    machine = Machine(Link(0.0, 512 / wire_s), {"mm": kernel, "dgrad": kernel, "wgrad": kernel})
    return simulate(
        data_parallel_step([[512, 512]] * layers, shard=shard, splits=splits), machine, spans=False
    ).makespan_s


@pytest.mark.parametrize(
    ("shard", "ratio"), [("gradients", 0.3), ("gradients", 0.6), ("parameters", 1.0), ("none", 0.6)]
)
def test_what_is_exposed_is_less_than_a_layer(shard, ratio):
    assert makespan(shard, ratio) < 48.0 + 1.0


def test_replicated_parameters_leave_the_wire_idle_in_forward():
    """Nothing can move before backward: the bound is forward plus what moves, once that is more than backward."""
    assert 16.0 + 48.0 <= makespan("none", 1.0) < 16.0 + 48.0 + 1.5


def test_what_is_refused():
    for layers in ([], [[1, 1], [1]]):
        with pytest.raises(ScheduleError, match="one number of ranks"):
            data_parallel_step(layers)
    with pytest.raises(ScheduleError, match=re.escape("'optimizer'")):
        data_parallel_step([[1]], shard="optimizer")
    with pytest.raises(ScheduleError, match="a mode of"):
        data_parallel_step([[1]], mode="auto")
