import pytest
import torch
import torch.nn.functional as F

import flashoverlap.torch as fo
from flashoverlap.choice import choose, rows_class
from flashoverlap.flow import FLOWS
from flashoverlap.machine import Link, Machine
from flashoverlap.matmul import Matmul
from flashoverlap.overlap import Overlap
from flashoverlap.patterns import split_sizes
from flashoverlap.plan import plan
from flashoverlap.torch.transport import transport_of
from ranks import run_ranks
from unsharded import ALL_REDUCE, ALL_REDUCE_GRAD, COLUMN, MLP, QKV, ROW, Problem

MACHINE = Machine(Link(1e-4, 1e8), matmul=Matmul(6e10, 2e-5, 1e10), issue_s=5e-6)
SIZES = {"features": 512, "hidden": 1024}
ROWS = (2048,) * 4


def test_without_a_machine_it_is_the_rule_of_thumb():
    for op in FLOWS:
        choice = choose(Overlap(), op, ROWS)
        assert (choice.mode, choice.code, choice.predicted_s) == ("flash", "rule_of_thumb", None)
        assert choose(Overlap(), op, ROWS, machine=MACHINE) == choice  # nor is there a plan without sizes
    assert choose(Overlap(), "mlp", ROWS, machine=MACHINE, sizes=SIZES, dtype="complex64").code == "rule_of_thumb"
    assert choose(Overlap(), "mlp", (8,), machine=MACHINE, sizes=SIZES).code == "one_rank"


def test_kernels_that_need_many_rows_are_cut_less():
    def splits(rows, fewest):
        return choose(Overlap(), "attention_all_to_all", [rows] * 2, fewest_rows=fewest).splits

    assert [splits(rows, 256) for rows in (100, 512, 2048, 10**5)] == [1, 2, 8, 8]
    assert [splits(rows, 768) for rows in (100, 1535, 1536, 2048, 10**5)] == [1, 1, 2, 2, 8]
    assert choose(Overlap("flash", splits=5), "mlp", ROWS, fewest_rows=768).splits == 5


@pytest.mark.parametrize(("rows", "mode"), [(1, "off"), (8, "off"), (64, "off"), (511, "off"), (512, "flash")])
def test_small_calls_without_a_machine_overlap_nothing(rows, mode, monkeypatch):
    monkeypatch.setattr("flashoverlap.choice.WORTH_BYTES", 1 << 20)
    for op, sizes in (
        ("mlp", SIZES),
        ("matmul_reduce_scatter", {"heads": 4, "head_dim": 128, "keys": rows, "out": 512}),
    ):
        choice = choose(Overlap(), op, split_sizes(rows, 2), sizes=sizes)
        assert (choice.mode, choice.code) == (mode, "small" if mode == "off" else "rule_of_thumb")
        if mode == "off":
            assert choice.reason == f"{2048 * rows} bytes are too few to overlap without a plan"
        for asked in (Overlap("flash"), Overlap(splits=1), Overlap("slice")):  # what was asked for is taken
            assert choose(asked, op, split_sizes(rows, 2), sizes=sizes).mode != "off"
        assert choose(Overlap(), op, split_sizes(rows, 2), sizes=sizes, machine=MACHINE).code in ("plain", "planned")


def test_small_calls_are_told_in_the_report(monkeypatch):
    monkeypatch.setattr("flashoverlap.choice.WORTH_BYTES", 1 << 20)
    fo.report().clear()
    problem = Problem(MLP, (2, 3, 5))
    run_ranks(2, lambda rank, group: problem.check(rank, group, fo.Overlap()))
    assert {(record.mode_taken, record.reason_code) for record in fo.report()} == {("off", "small")}


@pytest.mark.parametrize("op", ["all_reduce", "all_reduce_backward", "all_reduce_backward-w"])
def test_few_rows_without_a_machine_are_cut_along_features(op, monkeypatch):
    monkeypatch.setattr("flashoverlap.choice.WORTH_BYTES", 1 << 20)

    def taken(rows, ranks=2, overlap=Overlap("flash"), **sizes):
        sizes = {"features": 4096, "out": 4096, **sizes}
        return choose(overlap, op, split_sizes(rows, ranks), sizes=sizes)

    few, many = taken(64), taken(1024)
    assert (few.along, few.code, few.detail) == ("features", "rule_of_thumb", "direct x2 along features")
    assert few.reason == "2 splits by rule of thumb, not by a plan; pieces of features, as 64 rows are few"
    assert (many.along, many.detail) == ("rows", "direct x2")
    assert taken(1).splits == 1  # messages would be nothing but latency
    assert taken(64, features=40, out=40).along == "rows"  # which there are more of
    assert taken(0).along == "rows"
    assert taken(64, overlap=Overlap("flash", splits=9999)).reason.startswith("2048 splits, one a feature")
    for mode in ("off", "slice"):  # whose kernels are whole: features only where ranks would be left without rows
        assert [taken(rows, 4, Overlap(mode)).along for rows in (3, 4)] == ["features", "rows"]
    assert taken(1, overlap=Overlap("collective")).along == "rows"
    small = taken(1, 4, Overlap())
    assert (small.mode, small.code, small.along, small.detail) == ("off", "small", "features", "along features")
    assert choose(Overlap("flash"), "mlp", (32, 32), sizes=SIZES).along == "rows"


def test_features_are_planned_too():
    machine = Machine(Link(2e-5, 1.25e8), matmul=Matmul(2e12, 2e-6, 1e10), issue_s=2e-6)
    sizes = {"features": 2048, "out": 4096}
    choice = choose(Overlap(), "all_reduce", (32, 32), machine=machine, sizes=sizes)
    found = plan("linear_all_reduce", {"rows": 64, **sizes}, machine, ranks=2)
    assert choice.along == found.choice.along == "features"
    assert choice.detail == f"direct x{found.choice.splits} along features"
    assert (choice.reason, choice.predicted_s) == (found.reason, found.predicted_s)


def test_layers_are_planned_too():
    machine = Machine(
        Link(1e-6, 2e9), matmul=Matmul(5e12, 2e-5, 1e12), issue_s=1e-6, collective_efficiency=0.6, contention=0.1
    )
    sizes = {"features": 1024, "hidden": 256}
    choice = choose(Overlap(), "mlp_backward", (8,) * 8, machine=machine, sizes=sizes)
    found = plan("mlp backward", {"rows": 64, **sizes}, machine, ranks=8)
    assert (choice.mode, choice.reason, choice.predicted_s) == ("layers", found.reason, found.predicted_s)
    assert [layer[:3] for layer in choice.layers] == [layer.choice[:3] for layer in found.layers]
    assert sum(layer.predicted_s or 0.0 for layer in choice.layers) == pytest.approx(found.predicted_s)


def test_with_a_machine_it_is_the_plan():
    choice = choose(Overlap(), "mlp", ROWS, machine=MACHINE, sizes=SIZES)
    found = plan("mlp", {"rows": 8192, **SIZES}, MACHINE, ranks=4)
    assert choice[:3] == found.choice[:3]
    assert (choice.code, choice.reason, choice.nodes) == ("planned", found.reason, 1)
    assert (choice.predicted_s, choice.predicted_exposed_s) == (found.predicted_s, found.exposed_s)
    assert choose(Overlap(), "mlp", (1, 1, 0, 0), machine=MACHINE, sizes=SIZES).code == "plain"


@pytest.mark.parametrize(
    ("overlap", "mode", "code"),
    [
        (Overlap("off"), "off", "asked"),
        (Overlap("collective"), "collective", "asked"),
        (Overlap("flash", splits=3), "flash", "asked"),
        (Overlap("slice", slices=3), "slice", "asked"),
        (Overlap("flash"), "flash", "planned"),
        (Overlap("slice"), "slice", "planned"),
    ],
)
def test_what_was_asked_for_is_predicted_and_what_was_left_open_planned(overlap, mode, code):
    choice = choose(overlap, "mlp", ROWS, machine=MACHINE, sizes=SIZES)
    assert (choice.mode, choice.code) == (mode, code)
    assert choice.predicted_s is not None
    assert choice.splits == {"asked": {"flash": 3, "slice": 3}.get(mode, 1)}.get(code, choice.splits)


def test_no_piece_is_cut_into_more_parts_than_it_has_rows():
    choice = choose(Overlap("flash", splits=9), "mlp", [3, 2], machine=MACHINE, sizes=SIZES)
    assert (choice.splits, choice.reason) == (3, "3 splits, one a row, where 9 were asked for")


def test_calls_of_nearly_as_many_rows_share_a_plan():
    for ranks in (2, 5):
        classes = {rows_class(rows, ranks) for rows in range(1, 100_000)}
        assert len(classes) < 64 * ranks + 12 * 32
        for rows in (0, 1, 17, 130, 999, 4097, 81_919):
            piece = split_sizes(rows, ranks)[0]
            planned = split_sizes(rows_class(rows, ranks), ranks)[0]
            assert abs(planned - piece) <= piece / 64
            assert rows_class(rows_class(rows, ranks), ranks) == rows_class(rows, ranks)
    assert rows_class(37, 4) == 37


@pytest.mark.parametrize(
    "overlap", [fo.Overlap(), fo.Overlap("flash"), fo.Overlap("slice"), fo.Overlap("off")], ids=str
)
@pytest.mark.parametrize("op", [COLUMN, QKV, ROW, ALL_REDUCE, ALL_REDUCE_GRAD, MLP], ids=str)
def test_operators_plan_with_the_machine_of_their_group_and_stay_right(op, overlap):
    """Two nodes, so that spread rounds run too; shards are uneven, so the ranks have to agree on what they plan for."""
    nodes = Machine(Link(0.0, 1e6), matmul=Matmul(1e9), nodes=(2, 2), uplink=Link(1e-5, 5e5))
    problem = Problem(op, (2, 67, 5))
    fo.report().clear()

    def main(rank, group):
        transport_of(group).use(nodes)
        problem.check(rank, group, overlap)

    run_ranks(4, main)
    records = fo.report().records
    assert records
    assert {record.reason_code for record in records} <= {"planned", "plain", "asked"}
    for phase in {record.op for record in records}:  # the same on all ranks
        assert len({(record.mode_taken, record.detail) for record in records if record.op == phase}) == 1


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 3}], ids=str)
def test_attention_plans_too(options):
    random = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 4, 11, 6, generator=random, dtype=torch.float64) for _ in range(3))
    weight = torch.randn(5, 24, generator=random, dtype=torch.float64)
    at = torch.arange(11)
    seen = at[:, None] >= at if options else torch.ones(11, 11, dtype=torch.bool)
    seen &= at[:, None] - at < options.get("window", 99)
    heads = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    want = heads.transpose(1, 2).flatten(2) @ weight.t()
    fo.report().clear()

    def main(rank, group):
        transport_of(group).use(MACHINE)
        shards = [tensor.chunk(2, 1)[rank].clone().requires_grad_() for tensor in (q, k, v)]
        z = fo.attention_reduce_scatter(*shards, weight.chunk(2, 1)[rank], group=group, **options)
        torch.testing.assert_close(z, want.tensor_split(2, 1)[rank], atol=1e-10, rtol=1e-10)
        z.sum().backward()

    run_ranks(2, main)
    assert {record.reason_code for record in fo.report().records} <= {"planned", "plain"}
