"""Which mode a data-parallel step takes, by the schedules that it is replayed with."""

import re

import pytest

from flashoverlap import Link, Machine, Matmul, Overlap, ScheduleError, simulate
from flashoverlap.step import SHARDS
from flashoverlap.step_plan import Layer, cut, plan_step

each_shard = pytest.mark.parametrize("shard", SHARDS)


def machine(bytes_per_s=1e9, **costs):
    return Machine(Link(1e-5, bytes_per_s), matmul=Matmul(1e11, memory_bytes_per_s=1e10), **costs)


def stack(count=8, features=512, tokens=1024, ranks=2, splits=1):
    """Linears of one size, the first of which needs no gradient of its input."""
    rows, row_bytes = -(-features // ranks), 4 * features
    return [Layer(rows, row_bytes, features, tokens, number > 0, splits) for number in range(count)]


@each_shard
def test_what_is_hidden_behind_matmuls_is_planned_as_flash(shard):
    found = plan_step(stack(), machine(), ranks=2, shard=shard)
    off = next(each for each in found.candidates if each.mode == "off")
    assert (found.choice.mode, found.code, found.op) == ("flash", "planned", f"data_parallel_step_{shard}")
    assert found.bound_s <= found.predicted_s < off.seconds
    assert found.exposed_s < (off.seconds - found.compute_s) / 3
    assert f"{off.seconds * 1e3:.3f} ms in off" in found.reason


@each_shard
def test_seconds_of_a_plan_are_those_of_its_schedule(shard):
    """With the kernels of each layer: three matmuls a linear, two where its input needs no gradient."""
    layers = stack(3)
    for mode in ("off", "flash", "slice", "collective"):
        found = plan_step(layers, machine(float("inf")), ranks=2, shard=shard, overlap=Overlap(mode))
        assert [each.mode for each in found.candidates] == [mode]
        kernels = {op.kernel for op in found.schedule().programs[0] if getattr(op, "kernel", "")}
        assert kernels == {"mm0", "mm1", "mm2", "wgrad0", "wgrad1", "wgrad2", "dgrad1", "dgrad2"}
        assert found.compute_s == pytest.approx(8 * 2 * 1024 * 512 * 512 / 1e11)
        copied_s = found.predicted_s - found.compute_s - 1e-5 * 8 * 3  # no more than as many latencies
        assert copied_s < 0.03 * found.compute_s


@each_shard
def test_nothing_is_overlapped_where_nothing_is_gained(shard):
    """Few bytes on a fast wire, or next to nothing to compute: as fast, and simpler."""
    fast = plan_step(stack(2, 64, 1 << 16), machine(1e12), ranks=2, shard=shard)
    idle = plan_step([Layer(10, 4)], machine(), ranks=2, shard=shard)
    assert [(each.choice.mode, each.code) for each in (fast, idle)] == [("off", "plain")] * 2


def test_sharded_gradients_are_not_kept_whole_to_save_one_percent():
    layers, fast = stack(16, 2048, 8192), machine(1e13)
    assert plan_step(layers, fast, ranks=2, shard="none").choice.mode == "off"
    for shard in SHARDS[1:]:
        found = plan_step(layers, fast, ranks=2, shard=shard)
        assert {each.mode for each in found.candidates} == {"flash"}
        assert plan_step(layers, fast, ranks=2, shard=shard, overlap=Overlap("off")).choice.mode == "off"


def test_splits_are_those_of_the_first_linear():
    layers = [Layer(100, 4), *stack(3), Layer(7, 4)]
    assert [layer.splits for layer in cut(layers, 4)] == [1, 4, 1, 1, 1]
    found = plan_step(layers, machine(), ranks=2, shard="gradients")
    assert {each.splits for each in found.candidates if each.mode == "flash"} >= {1, 2}
    few = plan_step(stack(2, 4), machine(), ranks=2)  # of two rows each
    assert {each.splits for each in few.candidates} <= {1, 2}
    as_cut = plan_step(stack(2, splits=2), machine(), ranks=2)  # no fewer than others have
    assert {each.splits for each in as_cut.candidates if each.mode == "flash"} >= {2, 4}


def test_splits_that_were_asked_for_are_kept():
    for mode in ("auto", "flash"):
        found = plan_step(stack(3, splits=3), machine(), ranks=2, overlap=Overlap(mode, splits=3))
        assert {each.splits for each in found.candidates if each.mode == "flash"} == {3}


def test_a_plan_in_words():
    text = str(plan_step(stack(2), machine(), ranks=2, shard="gradients"))
    assert text.startswith("data_parallel_step_gradients, 1024 rows on 2 ranks: flash direct x")
    assert " ms  off" in text


def test_many_ranks_that_are_alike():
    found = plan_step(stack(2, ranks=16), machine(post_s=1e-6), ranks=16, shard="gradients")
    assert found.schedule().ranks == 16
    assert found.rows == (64,) * 16


def test_one_rank_has_nothing_to_move():
    found = plan_step(stack(2, ranks=1), machine(), ranks=1)
    assert (found.code, found.choice.mode) == ("one_rank", "flash")
    assert found.exposed_s == pytest.approx(0.0, abs=1e-12)


def test_what_is_refused():
    with pytest.raises(ValueError, match="machine with matmul"):
        plan_step(stack(2), Machine(Link(0.0, 1e9)), ranks=2)
    with pytest.raises(ValueError, match="'ring'"):
        plan_step(stack(2), machine(), ranks=2, overlap=Overlap("flash", pattern="ring"))
    with pytest.raises(ValueError, match="4 ranks"):
        plan_step(stack(2), machine(nodes=(2, 2)), ranks=2)
    with pytest.raises(ScheduleError, match=re.escape("'optimizer'")):
        plan_step(stack(2), machine(), ranks=2, shard="optimizer")


def test_kernels_of_the_schedule_are_known_to_nobody_else():
    """A plan's machine has the kernels of its layers; the schedule alone does not run on one without."""
    found = plan_step(stack(2), machine(), ranks=2)
    with pytest.raises(ValueError, match="no kernel"):
        simulate(found.schedule(), machine())


@pytest.mark.parametrize("splits", [1, 4, 8])
def test_what_is_tried_depends_on_no_splits_that_the_first_linear_has(splits):
    stack = [Layer(64, 512, 64, 256, False, splits), Layer(64, 512, 64, 256, True, 1)]
    machine = Machine(Link(1e-3, 1e8), matmul=Matmul(1e10))
    tried = {
        each.splits for each in plan_step(stack, machine, ranks=2, shard="none").candidates if each.mode == "flash"
    }
    assert 1 in tried
