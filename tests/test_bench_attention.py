"""bench attention and bench ulysses: their sizes, their references, wrong values, and whole runs beside the peers."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from flashoverlap.bench.attention import Attention
from flashoverlap.bench.candidates import candidates
from flashoverlap.bench.dense_attention import attended
from flashoverlap.bench.measure import Bench
from flashoverlap.bench.options import Options
from flashoverlap.bench.peers import missing
from flashoverlap.bench.run import run
from flashoverlap.bench.shapes import AttentionShape, UlyssesShape
from flashoverlap.bench.ulysses import WEIGHTS, Ulysses
from flashoverlap.lab import lab_unavailable
from ranks import run_ranks

ATTENTION = AttentionShape(32, 32, 4, 2)
ULYSSES = UlyssesShape(32, 32, 4, 2, 2)


# --- sizes


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shape": AttentionShape(heads=0)}, "--heads 0: at least 1"),
        ({"shape": AttentionShape(hidden=1000)}, "--hidden 1000: a multiple of --heads 16"),
        ({"shape": AttentionShape(kv_heads=3)}, "--kv-heads 3: a divisor of --heads 16"),
        ({"shape": AttentionShape(kv_heads=2), "ranks": 3}, "--kv-heads 2: at least one for each of --ranks 3"),
        ({"shape": AttentionShape(compare="column")}, "--compare column: unknown; known: row"),
        ({"shape": UlyssesShape(seq=33)}, "--seq 33: a multiple of --ranks 2"),
        ({"shape": UlyssesShape(heads=1, kv_heads=1)}, "--heads 1: a multiple of --ranks 2"),
        ({"shape": UlyssesShape(kv_heads=1)}, "--kv-heads 1: a multiple of --ranks 2"),
        ({"shape": ATTENTION, "peers": ("deepspeed",)}, "--peers deepspeed can run bench ulysses, not attention"),
        (
            {"shape": ULYSSES, "peers": ("dtensor",)},
            "--peers dtensor can run bench mlp, bench block, bench model, not u",
        ),
    ],
)
def test_meaningless_options_are_refused_with_their_value(options, told):
    with pytest.raises(ValueError, match=told):
        Options(**options)


@pytest.mark.parametrize("shape", [AttentionShape(causal=True, compare="row"), ULYSSES])
def test_options_survive_json(shape):
    options = Options(shape, phase="train", modes=("flash",))
    assert Options.from_json(options.to_json()) == options


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ideal_bytes_of_even_parts(ranks):
    away = 32 * (ranks - 1) // ranks
    assert [ATTENTION.ideal_elements(ranks, train) for train in (False, True)] == [away * 32, 2 * away * 32]
    shape = UlyssesShape(32, 64, 8, 4, 2)  # q of 64, k and v of 32 features, and 64 back
    sent = 2 * away * (64 + 2 * 32 + 64) // ranks
    assert [shape.ideal_elements(ranks, train) for train in (False, True)] == [sent, 2 * sent]


def test_ideal_bytes_of_uneven_rows_are_those_of_the_busiest_rank():
    shape = UlyssesShape(5, 4, 2, 2)
    # rank 0 has 3 rows: it sends 2 of 4 features of q, k and v for each, and gets the 2 of its heads for 2 rows
    assert shape.ideal_elements(2, False) == 3 * 6 + 2 * 2
    assert AttentionShape(5, 4, 2, 2).ideal_elements(2, False) == 3 * 4


def test_a_compared_row_runs_as_flash_does():
    found = candidates(Options(AttentionShape(compare="row"), modes=("flash",), splits="best"))
    rows = [
        (one.row, one.variant, one.overlap.mode, one.overlap.splits) for one in found if one.row in ("flash", "row")
    ]
    assert rows == [(row, "row" * (row == "row"), "flash", k) for row in ("flash", "row") for k in (1, 2, 4, 8)]


# --- references


@pytest.mark.parametrize("causal", [False, True])
def test_attention_some_queries_at_a_time(monkeypatch, causal):
    monkeypatch.setattr("flashoverlap.bench.dense_attention._QUERIES", 3)
    q, k, v = (torch.randn(2, heads, 8, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2).flatten(2)
    grad = torch.randn_like(out)
    right = torch.autograd.grad(out, (q, k, v), grad)
    torch.testing.assert_close(attended(q, k, v, range(8), causal, grad), out)
    torch.testing.assert_close((q.grad, k.grad, v.grad), right)
    torch.testing.assert_close(attended(q, k, v, range(3, 7), causal), out[:, 3:7].detach())


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_of_query_split_attention_is_unsharded(causal):
    cases = [Attention(AttentionShape(7, 24, 6, 3, 2, causal), torch.float64, rank, 2) for rank in range(2)]
    q, k, v, weight = (tensor.clone().requires_grad_() for tensor in cases[0].full.values())
    attention = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    out = F.linear(attention.transpose(1, 2).flatten(2), weight)
    out.backward(cases[0]._full_grad)
    found = [case.reference(True) for case in cases]
    dims = {"out": 1, "q": 1, "k": 1, "v": 1, "weight": 1}
    right = {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad, "weight": weight.grad}
    for name, dim in dims.items():
        torch.testing.assert_close(torch.cat([one[name] for one in found], dim), right[name])
    assert [one["q"].shape[1] for one in found] == [4, 2]
    assert [list(case.reference(False)) for case in cases] == [["out"]] * 2


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_of_ulysses_is_unsharded(causal):
    cases = [Ulysses(UlyssesShape(7, 24, 6, 3, 2, causal), torch.float64, rank, 2) for rank in range(2)]
    x, *weights = (tensor.clone().requires_grad_() for tensor in cases[0].full.values())
    q, k, v = (cases[0].by_head(F.linear(x, weight)) for weight in weights[:3])
    attention = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    out = F.linear(attention.transpose(1, 2).flatten(2), weights[3])
    out.backward(cases[0]._full_grad)
    found = [case.reference(True) for case in cases]
    for name, right in {"out": out.detach(), "x": x.grad}.items():
        torch.testing.assert_close(torch.cat([one[name] for one in found], 1), right)
    for name, weight in zip(WEIGHTS, weights, strict=True):  # a rank has what its rows add
        torch.testing.assert_close(found[0][name] + found[1][name], weight.grad)
        assert not torch.allclose(found[0][name], found[1][name])
    torch.testing.assert_close(cases[1].reference(False)["out"], found[1]["out"])


# --- values


def measured(options):
    """The parts of both ranks, as threads of this process."""
    barrier = threading.Barrier(options.ranks)
    return run_ranks(options.ranks, lambda rank, group: Bench(options, candidates(options), group, barrier.wait).run())


@pytest.mark.parametrize("shape", [AttentionShape(32, 32, 4, 2, compare="row"), ULYSSES])
@pytest.mark.parametrize("phase", ["forward", "train"])
def test_right_values_raise_no_complaint(shape, phase):
    ranks = measured(Options(shape, link="none", phase=phase, repeats=1, modes=("flash", "collective")))
    assert [part.complaint for parts in ranks for part in parts] == [""] * sum(map(len, ranks))
    for parts in ranks:
        assert [part.peak_bytes is None for part in parts] == [part.row == "compute" for part in parts]


@pytest.mark.parametrize(("kind", "shape"), [(Attention, ATTENTION), (Ulysses, ULYSSES)])
def test_a_wrong_gradient_is_seen(monkeypatch, kind, shape):
    right = kind.forward

    def wrong(self, group, overlap):
        out = right(self, group, overlap)
        spoilt = overlap.mode == "flash" and self.rank == 1
        return out * 1.01 - 0.01 * out.detach() if spoilt else out  # right values, wrong gradients

    monkeypatch.setattr(kind, "forward", wrong)
    ranks = measured(Options(shape, link="none", repeats=1, modes=("flash",), phase="train"))
    told = {(rank, part.row) for rank, parts in enumerate(ranks) for part in parts if part.complaint}
    assert (1, "flash") in told
    assert {row for _, row in told} == {"flash"}
    assert "out" not in ranks[1][2].complaint.partition(": ")[2]


# --- whole runs


@pytest.mark.skipif(lab_unavailable() is not None, reason="no lab on this machine")
def test_attention_on_a_link():
    options = Options(
        AttentionShape(32, 32, 4, 2, causal=True, compare="row"), 2, "100mbit", ("slice", "flash"), repeats=1
    )
    outcome = run(options, timeout_s=100)
    assert outcome.complaints == []
    rows = {row["mode"]: row for row in outcome.result["rows"]}
    assert list(rows) == ["compute", "off", "slice", "flash", "row"]
    assert [row["wire_bytes"] for row in rows.values()] == [0, *[options.ideal_bytes] * 4]
    assert rows["flash"]["peak_bytes"] > 4 * 32 * 32  # of q alone
    assert outcome.result["shape"]["causal"] is True


@pytest.mark.skipif(lab_unavailable() is not None, reason="no lab on this machine")
def test_ulysses_on_a_link_beside_its_peers():
    there = tuple(peer for peer in ("deepspeed", "yunchang") if not missing(peer))
    options = Options(ULYSSES, 2, "100mbit", ("slice", "flash"), ("deepspeed", "yunchang"), "train", repeats=1)
    outcome = run(options, timeout_s=100)
    assert outcome.complaints == []
    rows = {row["mode"]: row for row in outcome.result["rows"]}
    assert list(rows) == ["compute", "off", "slice", "flash", *there]
    assert rows["flash"]["wire_bytes"] == rows["off"]["wire_bytes"] == options.ideal_bytes
    absent = [note for note in outcome.notes if "not installed (pip install flashoverlap[peers])" in note]
    assert len(absent) == 2 - len(there)
