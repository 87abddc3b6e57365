"""Pieces along rows or along features: what the planner makes of each, and that it takes the faster."""

from dataclasses import replace

import pytest

from flashoverlap import Kernel, Link, Machine, Matmul, Overlap, plan, simulate, verify
from flashoverlap.cut import FEW_ROWS, cuts_of

SIZES = {"features": 2048, "out": 4096}
# few rows take as long as one: the weight is read
MATMUL = Matmul(2e12, 2e-6, 1e10)
GIGABIT = Machine(
    Link(20e-6, 125e6), matmul=MATMUL, issue_s=2e-6, post_s=1e-5, notice_s=2e-5, collective_efficiency=0.7
)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("op", ["linear_all_reduce", "all_reduce_grad_linear backward"])
def test_few_rows_are_cut_along_features_so_that_no_weight_is_read_twice(op, ranks):
    found = plan(op, {"rows": 64, **SIZES}, GIGABIT, ranks=ranks)
    assert (found.choice.mode, found.choice.along, found.code) == ("flash", "features", "planned")
    assert {each.along for each in found.candidates} == {"rows", "features"}
    of = {along: min(c.seconds for c in found.candidates if c.along == along) for along in ("rows", "features")}
    assert of["features"] < 0.9 * of["rows"]
    assert "along features" in str(found.choice)
    assert str(found.choice) in found.reason
    assert str(found).startswith(f"{op}, 64 rows on {ranks} ranks: flash")
    assert sum(found.rows) == 64 or ranks == 3


def test_every_candidate_has_a_schedule_that_is_right_and_takes_what_was_said():
    rows, features = cuts_of("linear_all_reduce", SIZES, 50, 3, GIGABIT, (4, 4))
    assert (rows.along, rows.pieces) == ("rows", (17, 17, 16))
    assert (features.along, features.pieces) == ("features", (1366, 1366, 1366))
    found = plan("linear_all_reduce", {"rows": 50, **SIZES}, GIGABIT, ranks=3)
    assert (found.rows, found.features) == (rows.pieces, features.pieces)
    for candidate in found.candidates:
        one = replace(found, candidates=(candidate,)).schedule()
        cut = features if candidate.along == "features" else rows
        assert verify(one)
        assert simulate(one, cut.machine, spans=False).makespan_s == pytest.approx(candidate.seconds)
        assert found.bound_s <= candidate.seconds
    assert found.schedule().size("p0.0").rows == -(-1366 // found.choice.splits)
    assert dict(found.feature_bytes)["p"] == 50 * 4


def test_a_piece_of_features_reads_its_own_part_of_the_weight():
    rows, features = cuts_of("linear_all_reduce", SIZES, 50, 2, GIGABIT, (4, 4))
    whole, turned = (cut.machine.kernel("mm") for cut in (rows, features))
    assert turned.seconds(4096) == pytest.approx(whole.seconds(50) + 2 * 50 * 4 * 4096 / 1e10)  # turned at the end
    assert 2 * whole.seconds(25) > 1.9 * whole.seconds(50)  # all of it twice
    assert 2 * turned.seconds(2048) < 1.1 * whole.seconds(50)
    rows, features = cuts_of(
        "all_reduce_grad_linear backward", {"features": 2048, "out": (4096, 8)}, 50, 2, GIGABIT, (4, 4)
    )
    whole, turned = (cut.machine.kernel("wgrad") for cut in (rows, features))
    assert (
        turned.seconds(1)
        == pytest.approx(whole.seconds(1))
        == pytest.approx(MATMUL.seconds(4096, 50, 2048) + MATMUL.seconds(8, 50, 2048))
    )
    assert features.pieces == (1024, 1024)


def test_what_cannot_be_cut_along_features_is_not():
    many = 2 * FEW_ROWS
    assert len(cuts_of("linear_all_reduce", SIZES, many - 1, 2, GIGABIT, (4, 4))) == 1  # a piece of 256 rows
    assert len(cuts_of("linear_all_reduce", SIZES, many - 2, 2, GIGABIT, (4, 4))) == 2
    for op, sizes in (
        ("linear_reduce_scatter", SIZES),
        ("all_gather_linear", SIZES),
        ("mlp", {"features": 2048, "hidden": 4096}),
        ("all_reduce", {"features": 4096}),
        ("linear_all_to_all", SIZES),
    ):
        assert len(cuts_of(op, sizes, 64, 2, GIGABIT, (4, 4))) == 1
    for on in (
        replace(GIGABIT, kernels={"mm": Kernel(0.0, 1e-5)}),
        replace(GIGABIT, add=Kernel(0.0, 1e-9)),
        Machine(GIGABIT.link, {"mm": Kernel(0.0, 1e-5)}),
    ):  # what these cost is told by rows
        assert len(cuts_of("linear_all_reduce", SIZES, 64, 2, on, (4, 4))) == 1
    for rows, ranks in ((0, 2), (64, 1)):
        assert len(cuts_of("linear_all_reduce", SIZES, rows, ranks, GIGABIT, (4, 4))) == 1


def test_where_all_is_latency_nothing_is_tried():
    """bytedance/flux#90: at a few tokens nothing is won that a prediction could be sure of."""
    slow = replace(GIGABIT, link=Link(2e-3, 125e6))
    for on, rows, sizes in ((slow, 64, SIZES), (GIGABIT, 8, {"features": 512, "out": 512})):
        found = plan("linear_all_reduce", {"rows": rows, **sizes}, on, ranks=2)
        assert {each.along for each in found.candidates} == {"rows"}


def test_features_are_not_cut_where_rows_are_as_fast():
    """Of a matmul that loses nothing with fewer rows, rows are the simpler."""
    on = Machine(Link(0.0, 125e6), matmul=Matmul(1e10), issue_s=2e-6)
    found = plan("linear_all_reduce", {"rows": 128, **SIZES}, on, ranks=2, overlap=Overlap(splits=2))
    assert (found.choice.mode, found.choice.along) == ("flash", "rows")
    assert any(each.along == "features" for each in found.candidates)


@pytest.mark.parametrize(
    ("overlap", "modes"),
    [
        (Overlap("off"), {"off"}),
        (Overlap("slice"), {"slice"}),
        (Overlap("flash", splits=4), {"flash"}),
        (Overlap("collective"), {"collective"}),
    ],
    ids=str,
)
def test_what_was_asked_for_is_cut_either_way(overlap, modes):
    found = plan("linear_all_reduce", {"rows": 96, **SIZES}, GIGABIT, ranks=4, overlap=overlap)
    assert {each.mode for each in found.candidates} == modes
    assert ("features" in {each.along for each in found.candidates}) == (modes != {"collective"})


def test_a_row_for_every_rank_is_more_than_there_are():
    """One token on eight ranks: along rows all of the sum is one rank's."""
    found = plan(
        "linear_all_reduce", {"rows": 2, "features": 1024, "out": 8192}, replace(GIGABIT, link=Link(0.0, 1e7)), ranks=8
    )
    off = {each.along: each.seconds for each in found.candidates if each.mode == "off"}
    assert off["features"] < 0.5 * off["rows"]
