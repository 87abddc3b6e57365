import pytest

from flashoverlap.flow import flow_of
from flashoverlap.machine import Kernel, Link, Machine
from flashoverlap.matmul import Matmul
from flashoverlap.plan import plan
from flashoverlap.workload import OPERATORS, workload

COUNTING = Machine(Link(0.0, 1e30), matmul=Matmul(1.0))  # a flop a second: compute_s counts them
M, K, N, F, H, D, T = 96, 5, 7, 11, 3, 4, 64
LINEAR = {"features": K, "out": N}
MLP = {"features": K, "hidden": F, "out": N}
HEADS = {"heads": H, "head_dim": D, "keys": T, "out": N}
ALONE = {"heads": H, "head_dim": D, "keys": T}

# operator, sizes of a rank, flops of a rank on two ranks
FLOPS = [
    ("all_gather_linear", LINEAR, 2 * M * K * N),
    ("all_gather_linear backward", LINEAR, 4 * M * K * N),
    ("all_gather_linear", {"features": K, "out": (N, 1, 2)}, 2 * M * K * (N + 3)),
    ("all_gather_linear backward", {"features": K, "out": (N, 1, 2)}, 4 * M * K * (N + 3)),
    ("column_backward-w", LINEAR, 2 * M * K * N),
    ("column_backward-z", LINEAR, 2 * M * K * N),
    ("column_backward_saved", LINEAR, 4 * M * K * N),
    ("linear_reduce_scatter", LINEAR, 2 * M * K * N),
    ("linear_reduce_scatter backward", LINEAR, 4 * M * K * N),
    ("linear_all_reduce", LINEAR, 2 * M * K * N),
    ("all_reduce_grad_linear backward", LINEAR, 4 * M * K * N),
    ("mlp", MLP, 2 * M * F * (K + N)),
    ("mlp", {**MLP, "gated": True}, 2 * M * F * (2 * K + N)),
    ("mlp", {"features": K, "hidden": F}, 2 * M * F * 2 * K),
    ("mlp backward", {**MLP, "gated": 1}, 4 * M * F * (2 * K + N)),
    ("mlp_backward-w-v", MLP, 2 * M * F * (K + N)),
    ("attention_reduce_scatter", HEADS, 2 * M * H * D * (2 * T + N)),
    ("attention_reduce_scatter", {**HEADS, "causal": True}, 2 * M * H * D * (T + N)),
    ("attention_reduce_scatter backward", HEADS, 2 * M * H * D * (5 * T + 2 * N)),
    ("linear_all_to_all", {"features": K, "out": 2 * N}, M * K * 2 * N),
    ("linear_all_to_all backward", {"features": K, "out": 2 * N}, 2 * M * K * 2 * N),
    ("linear_all_to_all", {"features": K, "out": (2 * N, 2 * N)}, 2 * M * K * 2 * N),
    ("all_to_all_linear", LINEAR, 2 * M * K * N),
    ("all_to_all_linear backward", LINEAR, 4 * M * K * N),
    ("attention_all_to_all_linear", HEADS, 2 * M * H * D * (2 * T + N)),
    ("attention_all_to_all_linear backward", HEADS, 2 * M * H * D * (5 * T + 2 * N)),
    ("attention_all_to_all", ALONE, 4 * M * H * D * T),
    ("attention_all_to_all backward", ALONE, 10 * M * H * D * T),
    ("grad_reduce_scatter", {"features": K, "tokens": T}, 2 * M * K * T),
    ("param_all_gather", {"features": K, "tokens": T}, 2 * M * K * T),
    ("all_gather", {"features": K}, 0),
    ("reduce_scatter backward", {"features": K}, 0),
    ("all_reduce", {"features": K}, 0),
]


@pytest.mark.parametrize(("op", "sizes", "flops"), FLOPS)
def test_flops_of_a_rank(op, sizes, flops):
    assert plan(op, {"rows": M, **sizes}, COUNTING, ranks=2).compute_s == pytest.approx(flops)


@pytest.mark.parametrize(("op", "sizes"), [(op, sizes) for op, sizes, _ in FLOPS])
def test_every_kernel_and_every_letter_that_moves_has_a_size(op, sizes):
    work = workload(op, sizes, 2)
    flow = flow_of(work.flow)
    assert {*flow.kernels, *(w.kernel for w in flow.wgrads)} <= work.kernels.keys()
    moves = {flow.letters[0]} if flow.gather else set()
    moves |= {"p"} if flow.reduce or flow.swap is not None else set()
    moves |= {flow.extra} - {""}
    assert moves <= work.widths.keys()


def test_every_operator_has_its_flows():
    tested = {op for op, _, _ in FLOPS}
    for op, flows in OPERATORS.items():
        for phase, flow in zip(("", " backward"), flows, strict=True):
            if flow:
                assert flow_of(flow).op == flow
                assert f"{op}{phase}" in tested or op in ("all_gather", "reduce_scatter")


def test_bytes_that_travel():
    work = workload("linear_reduce_scatter", LINEAR, 2)
    assert work.row_bytes(2, 4)["p"] == 4 * N  # a sum on its way
    assert work.row_bytes(2, 4)["z"] == 2 * N
    assert workload("all_gather_linear", LINEAR, 2).row_bytes(2, 4)["x"] == 2 * K
    assert workload("linear_all_to_all", {"features": K, "out": (6, 8)}, 2).row_bytes(2, 4) == {
        "a": 10,
        "p": 6,
        "pb": 8,
    }


def test_kernels_of_the_machine_hold_before_matmuls_and_additions_touch_memory():
    memory = Machine(Link(0.0, 1.0), {"down": Kernel(9.0)}, matmul=Matmul(1e30, memory_bytes_per_s=1.0))
    on = workload("mlp", {**MLP, "gated": 1}, 2).on(memory, M, 2)
    assert on.kernel("down") == Kernel(9.0)
    traffic = 5 * F * M + 2 * (M * K + K * F + M * F)
    assert on.kernel("up").seconds(M) == pytest.approx(2 * traffic)
    assert on.add.seconds(1) == pytest.approx(3 * N * 2)
    kept = Machine(Link(0.0, 1.0), add=Kernel(1.0), matmul=Matmul(1.0))
    assert workload("mlp", MLP, 2).on(kept, M, 2).add == Kernel(1.0)


def test_activations_and_attention_cost_what_the_device_takes_for_them():
    slow = Machine(Link(0.0, 1.0), matmul=Matmul(1e30, activation_s=1.0))
    mlp = workload("mlp", MLP, 2).on(slow, M, 4)
    assert mlp.kernel("up").seconds(M) == pytest.approx(F * M)
    assert mlp.kernel("down").seconds(M) == pytest.approx(0.0)
    assert workload("mlp backward", MLP, 2).on(slow, M, 4).kernel("down").seconds(M) == pytest.approx(2 * F * M)
    sizes = {"heads": 2, "head_dim": 8, "keys": 64, "causal": 1, "out": N}
    for phase, op, kernel in (
        ("", "attention_reduce_scatter", "mm"),
        (" backward", "attention_all_to_all", "attend_backward"),
    ):
        given = {name: size for name, size in sizes.items() if name != "out" or "scatter" in op}
        seconds = [
            workload(op + phase, given, 2).on(Machine(Link(0.0, 1.0), matmul=matmul), M, 4).kernel(kernel).seconds(M)
            for matmul in (Matmul(1.0), Matmul(1.0, attention=(2.0, 3.0)), Matmul(1.0, keys_at_once=64))
        ]
        met, more = 2 * M * 16 * 64 / 2 * (5 if phase else 2), 2 * M * 16 * min(M, 64) / 2 * (5 if phase else 2)
        assert seconds[1] - seconds[0] == pytest.approx(met * (2 if phase else 1))
        assert seconds[2] - seconds[0] == pytest.approx(more)


@pytest.mark.parametrize(
    ("op", "sizes", "message"),
    [
        ("mpl", {}, "unknown operator 'mpl'; known, alone or with ' backward': all_gather_linear, "),
        ("mlp forward", {}, "unknown operator 'mlp forward'"),
        ("linear_all_reduce backward", LINEAR, "linear_all_reduce moves nothing in its backward"),
        ("mlp-w", MLP, "mlp has no output 'w'"),
        ("mlp", {"features": 3}, "mlp: the size 'hidden' is missing; given: {'features': 3}"),
        (
            "mlp",
            {**MLP, "hiden": 3},
            r"unknown sizes \['hiden'\]; it takes \['features', 'gated', 'hidden', 'out', 'rows'\]",
        ),
        ("mlp", {**MLP, "hidden": -1}, "'hidden' must be whole numbers of 0 or more, not -1"),
        ("all_gather_linear", {"features": 3, "out": ()}, "'out' must be whole numbers"),
    ],
)
def test_what_is_refused(op, sizes, message):
    with pytest.raises(ValueError, match=message):
        workload(op, sizes, 2)
