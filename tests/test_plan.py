"""What the planner takes, and that it is the fastest of what it could have taken."""

import importlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashoverlap import Kernel, Link, Machine, Matmul, Overlap, build, plan, simulate, verify
from flashoverlap.alike import alike_after
from flashoverlap.drift import slowed
from flashoverlap.plan import Candidate, Plan

MATMUL = Matmul(60e9, 20e-6, 10e9)
GIGABIT = Machine(Link(100e-6, 125e6), matmul=MATMUL, issue_s=5e-6, collective_efficiency=0.9)
LOOPBACK = Machine(Link(50e-6, 2e9), matmul=MATMUL, issue_s=5e-6, collective_efficiency=0.8)
MLP = {"features": 512, "hidden": 1024, "gated": 1}
LINEAR = {"features": 512, "out": 512}
HEADS = {"heads": 4, "head_dim": 64, "keys": 512, "out": 512}
OPERATORS = {
    "all_gather_linear": LINEAR,
    "all_gather_linear backward": LINEAR,
    "linear_reduce_scatter": LINEAR,
    "linear_reduce_scatter backward": LINEAR,
    "linear_all_reduce": LINEAR,
    "all_reduce_grad_linear backward": LINEAR,
    "mlp": MLP,
    "mlp backward": MLP,
    "attention_reduce_scatter": HEADS,
    "attention_reduce_scatter backward": HEADS,
    "linear_all_to_all": {"features": 512, "out": (512, 256, 256)},
    "linear_all_to_all backward": {"features": 512, "out": (512, 256, 256)},
    "all_to_all_linear": LINEAR,
    "all_to_all_linear backward": LINEAR,
    "attention_all_to_all_linear": HEADS,
    "attention_all_to_all_linear backward": HEADS,
    "attention_all_to_all": {"heads": 4, "head_dim": 64, "keys": 512},
    "attention_all_to_all backward": {"heads": 4, "head_dim": 64, "keys": 512},
    "grad_reduce_scatter": {"features": 512, "tokens": 2048},
    "param_all_gather": {"features": 512, "tokens": 2048},
    "all_gather": {"features": 512},
    "reduce_scatter": {"features": 512},
    "all_reduce": {"features": 512},
}


@pytest.mark.parametrize(("ranks", "rows"), [(2, 600), (3, 601), (3, 40)])
@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_is_planned_with_schedules_that_are_right(op, ranks, rows):
    found = plan(op, {"rows": rows, **OPERATORS[op]}, GIGABIT, ranks=ranks)
    for candidate in found.candidates:
        assert all(map(verify, replace(found, candidates=(candidate,)).schedules()))
        assert found.bound_s <= candidate.seconds * (1 + 1e-9)
    assert found.predicted_s <= 1.02 * min(each.seconds for each in found.candidates)
    assert found.exposed_s == found.predicted_s - found.compute_s
    assert {"collective", "off"} <= {each.mode for each in found.candidates}


machines = st.builds(
    Machine,
    st.builds(Link, st.sampled_from([0.0, 1e-4, 2e-3]), st.sampled_from([2e7, 1e8, 1e9])),
    issue_s=st.sampled_from([0.0, 1e-5]),
    contention=st.sampled_from([0.0, 0.2]),
    collective_efficiency=st.sampled_from([0.5, 1.0]),
    matmul=st.builds(Matmul, st.sampled_from([1e10, 1e11]), st.sampled_from([0.0, 1e-4]), st.just(1e10)),
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([op for op in OPERATORS if "all_to_all" not in op]),
    machines,
    st.integers(2, 6),
    st.integers(1, 4000),
)
def test_no_schedule_that_could_be_taken_is_faster(op, on, ranks, rows):
    """Beside all patterns and splits, also those that the search has left out."""
    found = plan(op, {"rows": rows, **OPERATORS[op]}, on, ranks=ranks)
    planner = replace_machine(found, op, on, ranks)
    uneven = max(found.rows) / max(1, min(found.rows))  # a ring may have less to do with the largest piece
    for pattern in ("direct", "ring", "sliced"):
        for splits in (1, 2, 4, 8, 16):
            if splits == 1 or splits * 8 <= max(found.rows):
                schedule = build(
                    found.flow, found.rows, pattern=pattern, splits=splits, row_bytes=dict(found.row_bytes)
                )
                assert found.predicted_s <= 1.02 * uneven * simulate(schedule, planner, spans=False).makespan_s


def replace_machine(found, op, on, ranks):
    """The machine with the kernels of the call."""
    from flashoverlap.workload import workload

    return workload(op, OPERATORS[op], ranks).on(on, sum(found.rows), 4)


def test_the_prediction_is_what_the_simulator_says_of_the_schedule():
    on = Machine(Link(1e-4, 1e6), {"up": Kernel(1e-4, 1e-5), "down": Kernel(0.0, 1e-5)}, add=Kernel(0.0, 1e-8))
    found = plan("mlp", {"rows": 4000, **MLP}, on, ranks=4)
    assert simulate(found.schedule(), on).makespan_s == pytest.approx(found.predicted_s)
    assert found.compute_s == pytest.approx(1e-4 + 2 * 4000e-5)
    assert found.wire_s == pytest.approx(2 * 3 * 1000 * 512 * 4 / 1e6)
    assert found.bound_s == found.wire_s


# bytedance/flux#90, vllm-project/vllm#29136: overlapped paths that are slower than plain calls at small sizes
@pytest.mark.parametrize("on", [GIGABIT, LOOPBACK])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("op", ["mlp", "all_gather_linear", "linear_reduce_scatter", "linear_all_reduce"])
def test_a_few_tokens_take_the_plain_path_and_none_is_slower_than_off(op, ranks, on):
    for rows in (1, 8, 64, 1024, 8192):
        found = plan(op, {"rows": rows, **OPERATORS[op]}, on, ranks=ranks)
        off = next(each for each in found.candidates if each.mode == "off")
        assert found.predicted_s <= off.seconds * 1.01
        if rows <= 8:
            assert found.choice.mode in ("off", "collective")
            assert found.code == "plain"


def test_overlap_pays_where_there_is_much_to_compute_and_to_move():
    found = plan("mlp", {"rows": 8192, **MLP}, GIGABIT, ranks=4)
    assert (found.choice.mode, found.code) == ("flash", "planned")
    assert found.runner_up in found.candidates[1:]
    assert found.predicted_s < 1.05 * found.bound_s
    assert "flash direct x" in found.reason
    assert "collective" in found.reason or "off" in found.reason
    text = str(found)
    assert text.startswith("mlp, 8192 rows on 4 ranks: flash")
    assert len(text.splitlines()) == 3 + len(found.candidates)


def test_a_wire_that_costs_nothing_is_not_hidden():
    free = replace(GIGABIT, link=Link(0.0, 1e15), issue_s=0.0, collective_efficiency=1.0)
    found = plan("mlp", {"rows": 8192, **MLP}, free, ranks=4)
    assert (found.choice.mode, found.code) == ("off", "plain")
    assert {each.mode for each in found.candidates} == {"collective", "off"}  # nothing can be much faster
    assert "all but the least" in found.reason


def test_of_equals_the_simpler_is_taken():
    on = Machine(Link(0.0, 1e9), {"mm": Kernel(0.0, 1e-6)})
    found = plan("all_gather_linear", {"rows": 4096, "features": 1, "out": 1}, on, ranks=4)
    assert found.choice.mode == "off"
    slower = replace(on, link=Link(0.0, 4e6))
    found = plan("all_gather_linear", {"rows": 4096, "features": 1, "out": 1}, slower, ranks=4)
    assert found.choice[:4] == ("flash", "direct", 1, 1)  # more splits, and the ring, take as long


# aliyun/SimAI#22: with a latency a message, more and more chunks do not pay
def test_the_best_number_of_splits_lies_in_between():
    on = Machine(Link(1e-4, 1e7), {"mm": Kernel(0.0, 1e-6)})
    for row_bytes, low, high in ((8, 1, 16), (64, 1, 16)):
        found = plan("all_gather_linear", {"rows": 65536, "features": row_bytes // 4, "out": 1}, on, ranks=2)
        assert low < found.choice.splits < high or found.bound_s > 0.99 * found.predicted_s
    latency = replace(on, link=Link(10.0, 1e7))
    assert plan("all_gather_linear", {"rows": 65536, "features": 2, "out": 1}, latency, ranks=2).choice.splits == 1


@pytest.mark.parametrize(
    ("overlap", "candidates"),
    [
        (Overlap("off"), {("off", "sliced", 1)}),
        (Overlap("collective"), {("collective", "collective", 1)}),
        (Overlap("slice", slices=3), {("slice", "sliced", 3)}),
        (Overlap("flash", splits=5), {("flash", "direct", 5)}),
        (Overlap("flash", splits=5, pattern="ring"), {("flash", "ring", 5)}),
    ],
)
def test_what_was_asked_for_is_all_that_is_tried(overlap, candidates):
    found = plan("mlp", {"rows": 4096, **MLP}, GIGABIT, ranks=4, overlap=overlap)
    assert {each[:3] for each in found.candidates} == candidates
    assert found.code == "only"
    assert found.runner_up is None


def test_what_is_left_open_is_planned():
    shape = {"rows": 8192, **MLP}
    flash = plan("mlp", shape, GIGABIT, ranks=4, overlap=Overlap("flash"))
    assert {(each.mode, each.pattern) for each in flash.candidates} == {("flash", "direct")}
    assert len(flash.candidates) > 1
    ring = plan("mlp", shape, GIGABIT, ranks=4, overlap=Overlap("auto", pattern="ring", splits=3))
    assert {each[:3] for each in ring.candidates if each.mode == "flash"} == {("flash", "ring", 3)}
    assert {"off", "slice", "collective", "flash"} == {each.mode for each in ring.candidates}
    few = plan("mlp", {"rows": 8, **MLP}, GIGABIT, ranks=4, overlap=Overlap("flash", splits=9))
    assert few.choice.splits == 2  # one a row


def test_sums_on_their_way_are_as_wide_as_they_are_added():
    def bytes_of(pattern):
        overlap = Overlap("flash", pattern=pattern, splits=1)
        half = plan(
            "linear_reduce_scatter", {"rows": 512, **LINEAR}, GIGABIT, ranks=2, dtype="bfloat16", overlap=overlap
        )
        return half.schedule().wire_bytes(0)

    assert bytes_of("ring") == 2 * bytes_of("direct") == 256 * 512 * 4


def test_rounds_are_spread_over_nodes_where_the_uplink_is_what_holds_them_up():
    base = Machine(Link(0.0, 64.0), {"mm": Kernel()}, nodes=(8, 8), uplink=Link(0.0, 256.0))
    blocks = {"rows": 1024, "features": 16, "out": 16}
    direct = plan("all_gather_linear", blocks, base, overlap=Overlap("flash"))
    assert direct.choice[:4] == ("flash", "direct", 1, 2)
    in_order = next(each for each in direct.candidates if each.nodes == 1 and each.splits == 1)
    assert in_order.seconds == pytest.approx(19 / 16 * direct.predicted_s)
    assert direct.schedule() == build("all_gather_matmul", [64] * 16, row_bytes=dict(direct.row_bytes), nodes=2)
    narrow = replace(base, uplink=Link(0.0, 32.0))
    found = plan("all_gather_linear", blocks, narrow)
    assert found.choice.mode == "collective"  # as a ring, which takes every piece to a node once
    slow = plan("all_gather_linear", blocks, replace(narrow, collective_efficiency=0.1))
    assert slow.choice.pattern == "ring"


FAST = Machine(
    Link(1e-6, 2e9), matmul=Matmul(5e12, 2e-5, 1e12), issue_s=1e-6, collective_efficiency=0.6, contention=0.1
)


def test_layers_one_after_the_other_where_that_is_surely_faster():
    shape = {"rows": 64, "features": 1024, "hidden": 256}
    found = plan("mlp backward", shape, FAST, ranks=8)
    assert (found.choice.mode, found.code, str(found.choice)) == (
        "layers",
        "planned",
        f"per layer: {found.layers[0].choice}; {found.layers[1].choice}",
    )
    assert [layer.flow for layer in found.layers] == ["row_backward", "column_backward"]
    assert found.predicted_s == pytest.approx(sum(layer.predicted_s for layer in found.layers))
    assert 1.05 * found.predicted_s < min(each.seconds for each in found.candidates[1:])
    assert found.compute_s == pytest.approx(sum(layer.compute_s for layer in found.layers))
    assert found.schedules() == tuple(layer.schedule() for layer in found.layers)
    with pytest.raises(ValueError, match="mlp backward runs layer by layer"):
        found.schedule()
    for overlap in (Overlap("flash"), Overlap(splits=1), Overlap(pattern="ring"), Overlap("off")):
        assert not plan("mlp backward", shape, FAST, ranks=8, overlap=overlap).layers  # whoever asks for one schedule
    named = replace(FAST, kernels={name: Kernel(0.0, 1e-6) for name in ("up", "down", "wgrad_up", "wgrad_down")})
    assert not plan("mlp backward", shape, named, ranks=8).layers


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_whole_is_as_fast_as_its_layers_where_there_is_much_to_do(ranks):
    for op in ("mlp", "mlp backward"):
        for rows in (512, 2048, 8192):
            found = plan(op, {"rows": rows, **MLP}, GIGABIT, ranks=ranks)
            assert found.choice.mode == "flash"
            assert found.predicted_s <= 1.02 * sum(layer.predicted_s for layer in found.layers) or not found.layers


def test_of_those_that_are_about_as_fast_the_one_that_a_slower_wire_slows_least_is_taken():
    """Where kernels just hide the whole pieces, splits cost a little; and save much as soon as they just do not."""
    shape, overlap = {"rows": 2048, "features": 512, "hidden": 1024}, Overlap("flash")
    on = Machine(Link(1e-4, 120e6), matmul=Matmul(60e9), post_s=5e-4)
    found = plan("mlp", shape, on, ranks=2, overlap=overlap)
    whole, cut = (next(e for e in found.candidates if e.splits == splits) for splits in (1, 2))
    assert whole.seconds < cut.seconds < 1.02 * whole.seconds
    assert found.choice == cut
    slower = [
        plan("mlp", shape, slowed(on, 1.15), ranks=2, overlap=Overlap("flash", splits=splits)) for splits in (1, 2)
    ]
    assert slower[1].predicted_s < 0.97 * slower[0].predicted_s


def test_one_slow_rank_is_planned_for():
    links = (GIGABIT.link,) * 3 + (Link(100e-6, 12.5e6),)
    even = plan("mlp", {"rows": 8192, **MLP}, GIGABIT, ranks=4)
    uneven = plan("mlp", {"rows": 8192, **MLP}, replace(GIGABIT, links=links))
    assert uneven.wire_s == pytest.approx(10 * even.wire_s)
    assert uneven.predicted_s > 2 * even.predicted_s
    assert uneven.choice.splits > even.choice.splits


UNEVEN = (GIGABIT.link,) * 7 + (Link(100e-6, 12.5e6),)
UNLIKE = tuple(Link(100e-6, 125e6 * (1 + rank / 20)) for rank in range(16))
NODES = {"uplink": Link(2e-4, 125e6), "contention": 0.1}


@pytest.mark.parametrize(
    ("on", "ranks", "most"),
    [
        (GIGABIT, 4, 600),
        (GIGABIT, 8, 700),
        (replace(GIGABIT, link=Link(1e-4, 125e6, burst_bytes=2e5), post_s=1e-5, notice_s=3e-5, contention=0.1), 8, 800),
        (GIGABIT, 64, 3500),
        (replace(GIGABIT, nodes=(4, 4), **NODES), 8, 3500),
        (replace(GIGABIT, nodes=(3, 5), **NODES), 8, 6000),
        (replace(GIGABIT, links=UNEVEN, contention=0.1), 8, 7000),
        (replace(GIGABIT, nodes=(8, 8), **NODES), 16, 6000),
        (replace(GIGABIT, nodes=(5, 11), **NODES), 16, 7000),
        (replace(GIGABIT, links=UNLIKE, contention=0.1), 16, 7000),
    ],
    ids=[
        *("4", "8", "8 with bursts", "64", "2 nodes", "uneven nodes", "uneven links", "16 on 2 nodes"),
        *("16 on uneven nodes", "16 unlike links"),
    ],
)
def test_little_is_simulated(on, ranks, most, monkeypatch):
    """Operations of all the programs that are replayed for one plan; each takes some 6 us."""
    assert 0 < most_replayed(replace(on, issue_s=5.001e-6), ranks, 8192, monkeypatch) <= most


@pytest.mark.parametrize(("ranks", "most"), [(8, 2500), (16, 700), (64, 2500)])
def test_as_little_where_rows_do_not_divide(ranks, most, monkeypatch):
    """Also on a machine as calibration finds them, of whose wires each size has a rate of its own."""
    link = replace(GIGABIT.link, sizes=((1024, 2e-5), (65536, 6e-4), (1 << 20, 8.6e-3)), burst_bytes=176_000)
    on = replace(GIGABIT, link=link, post_s=5e-4, notice_s=2e-4, contention=0.1)
    assert 0 < most_replayed(on, ranks, 40 * ranks + 1, monkeypatch) <= most


def most_replayed(on, ranks, rows, monkeypatch):
    module, replayed = importlib.import_module("flashoverlap.plan"), []

    def counting(schedule, machine, *, spans):
        assert not spans
        replayed[-1] += sum(map(len, schedule.programs[: alike_after(schedule, machine)]))
        return simulate(schedule, machine, spans=spans)

    monkeypatch.setattr(module, "simulate", counting)
    for op, sizes in OPERATORS.items():
        replayed.append(0)
        plan(op, {"rows": rows, **sizes}, on, ranks=ranks)
    return max(replayed)


busy_machines = st.builds(
    Machine,
    st.builds(
        Link,
        st.sampled_from([0.0, 1e-4]),
        st.sampled_from([2e7, 1e9]),
        sizes=st.sampled_from([(), ((1024, 1e-5), (65536, 5e-4)), ((100_000, 1e-4),)]),
        burst_bytes=st.sampled_from([0, 10_000, 200_000]),
    ),
    ports=st.integers(1, 3),
    contention=st.sampled_from([0.0, 0.2]),
    matmul=st.builds(Matmul, st.sampled_from([1e10, 1e12]), st.just(1e-5), st.just(1e10)),
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(OPERATORS)), busy_machines, st.integers(2, 5), st.integers(1, 4000), st.booleans())
def test_nothing_is_faster_than_the_bound(op, on, ranks, rows, uneven):
    """Also where wires let bursts through, or several transfers at once, and where small transfers are the fastest."""
    if uneven:
        on = replace(on, links=(on.link,) * (ranks - 1) + (replace(on.link, bytes_per_s=on.link.bytes_per_s / 5),))
    found = plan(op, {"rows": rows, **OPERATORS[op]}, on, ranks=ranks)
    assert min(each.seconds for each in found.candidates if each.mode != "collective") >= found.wire_s * (1 - 1e-9)


def test_what_is_not_simulated_would_not_be_taken():
    """Against all numbers of parts, on machines of which the planner looks at few."""
    small = replace(GIGABIT.link, sizes=((1 << 16, (1 << 16) / 3.6e8), (1 << 23, (1 << 23) / 1.2e8)))
    machines = (replace(GIGABIT, nodes=(2, 2), **NODES), replace(GIGABIT, links=UNEVEN[-4:]), GIGABIT)
    for on in (*machines, replace(GIGABIT, link=small)):
        for op, sizes in OPERATORS.items():
            shape = {"rows": 4096, **sizes}
            taken = plan(op, shape, on, ranks=4)
            fixed = [
                Overlap("flash", pattern=pattern, splits=n) for pattern in ("direct", "ring") for n in (1, 2, 4, 8, 16)
            ]
            for overlap in (*fixed, *(Overlap("slice", slices=n) for n in (2, 4, 8))):
                alone = plan(op, shape, on, ranks=4, overlap=overlap)
                assert taken.predicted_s <= 1.0202 * alone.predicted_s, (op, overlap)


@pytest.mark.parametrize("op", ["mlp", "attention_reduce_scatter", "linear_all_to_all backward"])
def test_what_there_is_no_time_to_simulate_would_not_win_much(op, monkeypatch):
    module, shape = importlib.import_module("flashoverlap.plan"), {"rows": 4096, **OPERATORS[op]}
    on = replace(GIGABIT, links=UNLIKE, contention=0.1, issue_s=5.002e-6)
    hurried = plan(op, shape, on, ranks=16)
    monkeypatch.setattr(module, "_MOST_MESSAGES", 10**9)
    thorough = plan(op, shape, replace(on, issue_s=5.003e-6), ranks=16)  # another machine, so that none is kept
    assert len(hurried.candidates) < len(thorough.candidates)
    assert hurried.predicted_s < 1.05 * thorough.predicted_s


def test_few_rows_are_sliced_where_that_was_asked_for():
    for rows in (1, 2, 8, 31):
        found = plan("mlp", {"rows": rows, **MLP}, GIGABIT, ranks=2, overlap=Overlap("slice"))
        assert found.choice[:3] == ("slice", "sliced", min(2, found.rows[0]))


def test_one_rank_has_nothing_to_move():
    found = plan("mlp", {"rows": 100, **MLP}, GIGABIT, ranks=1)
    assert (found.code, found.predicted_s) == ("one_rank", found.compute_s + GIGABIT.issue_s * 2)
    assert found.wire_s == 0.0


def test_a_plan_is_kept():
    shape = {"rows": 512, "features": 8, "out": [8, 8]}
    first = plan("all_gather_linear", shape, GIGABIT, ranks=2)
    again = plan("all_gather_linear", {"out": (8, 8), "features": 8, "rows": 512}, replace(GIGABIT), ranks=2)
    assert first is again
    assert plan("all_gather_linear", shape, LOOPBACK, ranks=2) is not first
    assert isinstance(first, Plan)
    assert isinstance(first.choice, Candidate)


def test_no_rows_and_fewer_rows_than_ranks():
    for rows in (0, 1, 3):
        assert plan("mlp", {"rows": rows, **MLP}, GIGABIT, ranks=4).predicted_s >= 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": MLP}, "mlp: shape needs 'rows', a whole number of 0 or more, not None"),
        ({"shape": {"rows": -1, **MLP}}, "not -1"),
        ({"shape": {"rows": 8.5, **MLP}}, "mlp: rows must be a whole number, not 8.5"),
        ({"shape": {"rows": 8, **MLP, "hidden": "much"}}, "hidden must be a whole number, not 'much'"),
        ({"shape": {"rows": 8, **MLP, "out": [1, None]}}, r"out must be a whole number, not \[1, None\]"),
        ({"ranks": 2.0}, "ranks must be a whole number, not 2.0"),
        ({"ranks": 0}, "1 or more, not 0"),
        ({"ranks": None}, "ranks must be given for a machine that names neither nodes nor links"),
        ({"dtype": "int8"}, "dtype must be one of float64, float32, float16, bfloat16, not 'int8'"),
        ({"machine": Machine(GIGABIT.link)}, "this machine has no kernel 'up'; known: none"),
        ({"machine": replace(GIGABIT, nodes=(2, 3))}, "the nodes hold 5 ranks, and there are 2"),
        ({"op": "pml"}, "unknown operator 'pml'"),
    ],
)
def test_what_is_refused(change, message):
    arguments = {"op": "mlp", "shape": {"rows": 8, **MLP}, "machine": GIGABIT, "ranks": 2, **change}
    with pytest.raises(ValueError, match=message):
        plan(**arguments)


@pytest.mark.parametrize("change", [{"machine": "h100-nvlink"}, {"overlap": "flash"}])
def test_what_is_no_machine_and_no_overlap(change):
    with pytest.raises(TypeError, match="a Machine and an Overlap are needed"):
        plan("mlp", {"rows": 8, **MLP}, **{"machine": GIGABIT, "ranks": 2, **change})


@pytest.mark.parametrize(("post_s", "mode"), [(0.0, "flash"), (1e-4, "flash"), (2e-3, "off")])
def test_less_gain_than_a_message_costs_is_none(post_s, mode):
    """Off takes 4 ms for this, overlapped 2 to 3 and what its messages cost."""
    on = Machine(Link(0.0, 1e6), {"mm": Kernel(0.0, 1e-3)}, post_s=post_s, collective_efficiency=0.1)
    found = plan("all_gather_linear", {"rows": 2, "features": 500, "out": 1}, on, ranks=2)
    assert found.choice.mode == mode
