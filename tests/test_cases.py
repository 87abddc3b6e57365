"""Regressions named after reports of users of other systems (numbers as in the list of cases)."""

import random
import threading
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import flashoverlap.torch as fo
from flashoverlap.torch.transport import transport_of
from ranks import run_ranks
from unsharded import (
    ALL_REDUCE,
    ALL_REDUCE_GRAD,
    COLUMN,
    LINEARS,
    MLP,
    MODES,
    QKV,
    ROW,
    ROWS,
    Problem,
    shard,
)

OPERATORS = (*LINEARS, MLP)
REDUCED = (ROW, ALL_REDUCE)


def usable(rank, group):
    """The group still works, and values are right."""
    for op in (COLUMN, MLP):
        Problem(op, (9, 5), 0).check(rank, group)


@contextmanager
def loud(*says, error=(ValueError, TypeError, fo.PeerError), within_s=10.0):
    begin = time.monotonic()
    with pytest.raises(error) as caught:
        yield
    assert time.monotonic() - begin < within_s
    for said in says:
        assert said in str(caught.value), str(caught.value)


# --- C01: ranks that disagree -----------------------------------------------------------------------------------------

ONES = torch.ones
FLASH = fo.Overlap("flash", splits=2)


def _gather(x=(8, 16), w=(12, 16), dtype=torch.float32, dim=0, grad=False, **kw):
    return lambda group: fo.all_gather_linear(
        ONES(x, dtype=dtype).requires_grad_(grad), ONES(w, dtype=dtype), group=group, dim=dim, **kw
    )


def _scatter(
    x=(8, 16), w=(12, 16), dtype=torch.float32, dim=0, bias=False, op=fo.linear_reduce_scatter, grad=False, **kw
):
    return lambda group: op(
        ONES(x, dtype=dtype).requires_grad_(grad),
        ONES(w, dtype=dtype),
        ONES(w[0], dtype=dtype) if bias else None,
        group=group,
        dim=dim,
        **kw,
    )


def _reduce(**kw):
    return _scatter(op=fo.linear_all_reduce, **kw)


def _column(x=(8, 16), dtype=torch.float32, grad=True, **kw):
    return lambda group: fo.all_reduce_grad_linear(
        ONES(x, dtype=dtype).requires_grad_(grad), ONES(12, 16, dtype=dtype), group=group, **kw
    )


def _mlp(x=(8, 16), hidden=4, out=16, dtype=torch.float32, gated=False, bias=False, **kw):
    return lambda group: fo.mlp(
        ONES(x, dtype=dtype),
        ONES(hidden, 16, dtype=dtype),
        ONES(out, hidden, dtype=dtype),
        gate=ONES(hidden, 16, dtype=dtype) if gated else None,
        up_bias=ONES(hidden, dtype=dtype) if bias else None,
        group=group,
        dim=0 if len(x) == 2 else 1,
        **kw,
    )


BF16 = {"dtype": torch.bfloat16}
# what rank 0 does, what rank 1 does, what every rank is told
MISMATCHES = {
    "rows": (_gather(), _gather(x=(6, 16)), ("8", "6")),
    "rows of another split": (_gather(x=(6, 16)), _gather(x=(8, 16)), ("[6, 8]", "[7, 7]")),
    "batch": (_mlp(x=(2, 8, 16)), _mlp(x=(3, 8, 16)), ("[2, 8, 16]", "[3, 8, 16]")),
    "dtype": (_gather(), _gather(**BF16), ("float32", "bfloat16")),
    "features": (_gather(), _gather(x=(8, 17), w=(12, 17)), ("[8, 16]", "[8, 17]")),
    "dim": (_gather(x=(4, 4, 16), dim=0), _gather(x=(4, 4, 16), dim=1), ("dim 0", "dim 1")),
    "weights": (
        _gather(),
        lambda g: fo.all_gather_linear(ONES(8, 16), [ONES(12, 16)] * 2, group=g, dim=0),
        ("[12, 16]",),
    ),
    "save_gathered": (_gather(), _gather(save_gathered=True), ("=False", "=True")),
    "mode": (_gather(overlap=fo.Overlap("off")), _gather(overlap=FLASH), ("mode=off", "mode=flash")),
    "pattern": (
        _gather(overlap=fo.Overlap("flash", pattern="ring")),
        _gather(overlap=fo.Overlap("flash")),
        ("ring", "direct"),
    ),
    "splits": (_gather(overlap=FLASH), _gather(overlap=fo.Overlap("flash", splits=3)), ("splits=2", "splits=3")),
    "slices": (
        _gather(overlap=fo.Overlap("slice", slices=2)),
        _gather(overlap=fo.Overlap("slice", slices=3)),
        ("slices=2", "slices=3"),
    ),
    "accumulation": (_scatter(), _scatter(overlap=fo.Overlap(accumulate_dtype="float64")), ("=float32", "=float64")),
    "x wants a gradient": (_gather(grad=True), _gather(), ("grads=10", "grads=00")),
    "operator": (_gather(), _scatter(), ("all_gather_linear", "linear_reduce_scatter")),
    "scatter or reduce": (_reduce(), _scatter(), ("linear_all_reduce", "linear_reduce_scatter")),
    "rows of row": (_scatter(), _scatter(x=(6, 16)), ("[8, 16]", "[6, 16]")),
    "out of row": (_scatter(), _scatter(w=(11, 16)), ("[12, 16]", "[11, 16]")),
    "bias of row": (_scatter(), _scatter(bias=True), ("bias none", "bias [12]")),
    "dtype of row": (_scatter(), _scatter(**BF16), ("float32", "bfloat16")),
    "rows of all-reduce": (_reduce(), _reduce(x=(6, 16)), ("[8, 16]", "[6, 16]")),
    "out of all-reduce": (_reduce(), _reduce(w=(11, 16)), ("[12, 16]", "[11, 16]")),
    "dtype of all-reduce": (_reduce(), _reduce(**BF16), ("float32", "bfloat16")),
    "rows of all-reduced gradient": (_column(), _column(x=(6, 16)), ("[8, 16]", "[6, 16]")),
    "dtype of all-reduced gradient": (_column(), _column(**BF16), ("float32", "bfloat16")),
    "grad of all-reduced gradient": (_column(), _column(grad=False), ("grads=100", "grads=000")),
    "rows of mlp": (_mlp(), _mlp(x=(6, 16)), ("8", "6")),
    "out of mlp": (_mlp(), _mlp(out=15), ("[16, 4]", "[15, 4]")),
    "gate": (_mlp(), _mlp(gated=True), ("gate none", "gate [4, 16]")),
    "activation": (_mlp(), _mlp(activation="gelu"), ("silu", "gelu")),
    "bias of mlp": (_mlp(), _mlp(bias=True), ()),
}


def test_c01_ranks_that_disagree_are_all_told_and_the_group_is_usable_afterwards():
    def main(rank, group):
        for name, (zero, one, says) in MISMATCHES.items():
            with loud("all_gather_linear" if name == "weights" else "", *says, error=ValueError):
                (one if rank else zero)(group)
        usable(rank, group)

    run_ranks(2, main)


def test_c01_more_than_two_ranks():
    def main(rank, group):
        for zero, one, says in MISMATCHES.values():
            with loud(*says if says and "7" not in says[-1] else (), error=ValueError):
                (one if rank == 2 else zero)(group)
        usable(rank, group)

    run_ranks(3, main)


def test_c01_different_hidden_sizes_are_no_disagreement():
    def main(rank, group):
        z = _mlp(hidden=4 + rank, activation=F.relu)(group)
        assert torch.equal(z, torch.full((8, 16), 16.0 * 9))

    run_ranks(2, main)


# --- arguments that mean nothing, on one rank alone -------------------------------------------------------------------

X, W, B = ONES(4, 6), ONES(3, 6), ONES(3)
ag, rs, ar, arg = fo.all_gather_linear, fo.linear_reduce_scatter, fo.linear_all_reduce, fo.all_reduce_grad_linear
MEANINGLESS = {
    "overlap": lambda op, g: op(X, W, group=g, overlap="flash"),
    "no tensor": lambda op, g: op([[1.0]], W, group=g),
    "no weight": lambda op, g: op(X, None, group=g),
    "bias": lambda op, g: op(X, W, 1.0, group=g),
    "features": lambda op, g: op(X, ONES(3, 5), group=g),
    "bias size": lambda op, g: op(X, W, ONES(4), group=g),
    "one dimension": lambda op, g: op(ONES(6), W, group=g),
    "weight of three": lambda op, g: op(X, ONES(1, 3, 6), group=g),
    "dtype": lambda op, g: op(X, W.double(), group=g),
    "bf16 weight": lambda op, g: op(X, W.bfloat16(), group=g),
    "bias dtype": lambda op, g: op(X, W, B.double(), group=g),
    "integers": lambda op, g: op(X.int(), W.int(), group=g),
    "complex": lambda op, g: op(X.cfloat(), W.cfloat(), group=g),
    "sparse": lambda op, g: op(X.to_sparse(), W, group=g),
    "device": lambda op, g: op(X, W.to("meta"), group=g),
}
DIMS = {
    "feature dimension": lambda op, g: op(X, W, group=g, dim=-1),
    "feature dimension, counted up": lambda op, g: op(X, W, group=g, dim=1),
    "no such dimension": lambda op, g: op(X, W, group=g, dim=2),
    "half a dimension": lambda op, g: op(X, W, group=g, dim=0.5),
    "bool": lambda op, g: op(X, W, group=g, dim=True),
}
UP, DOWN = ONES(3, 6), ONES(6, 3)
OTHERS = [
    lambda g: ag(X, [], group=g),
    lambda g: ag(X, [W, ONES(3, 5)], group=g),
    lambda g: ag(X, [W, W], [B], group=g),
    lambda g: ag(X, [W, W], B, group=g),
    lambda g: ag(X, W, [B], group=g),
    lambda g: ag(X, "weight", group=g),
    lambda g: ag(X, W, group=g, save_gathered=1),
    lambda g: fo.mlp(X, UP, DOWN, activation="tanh", group=g),
    lambda g: fo.mlp(X, UP, DOWN, activation=None, group=g),
    lambda g: fo.mlp(X, UP, ONES(6, 4), group=g),
    lambda g: fo.mlp(X, UP, ONES(3), group=g),
    lambda g: fo.mlp(X, ONES(3, 5), DOWN, group=g),
    lambda g: fo.mlp(X, UP, DOWN, gate=ONES(4, 6), group=g),
    lambda g: fo.mlp(X, UP, DOWN, gate=ONES(3, 5), group=g),
    lambda g: fo.mlp(X, UP, DOWN, gate_bias=ONES(3), group=g),
    lambda g: fo.mlp(X, UP, DOWN, up_bias=ONES(4), group=g),
    lambda g: fo.mlp(X, UP, DOWN, down_bias=ONES(4), group=g),
    lambda g: fo.mlp(X, UP, DOWN.double(), group=g),
    lambda g: fo.mlp(X, UP, DOWN, dim=-1, group=g),
    lambda g: fo.mlp(X, None, DOWN, group=g),
    lambda g: fo.mlp(X, UP, DOWN, overlap=None, group=g),
]


def test_bad_arguments_of_one_rank_are_refused_there_and_the_peers_are_told():
    cases = [
        (lambda g, op=op, case=case: case(op, g), op)
        for op in (ag, rs, ar, arg)
        for case in (*MEANINGLESS.values(), *(DIMS.values() if op is not arg else ()))
    ]
    cases += [(case, ag if index < 7 else fo.mlp) for index, case in enumerate(OTHERS)]

    def main(rank, group):
        for index, (wrong, op) in enumerate(cases):
            right = (
                (lambda op=op: fo.mlp(X, UP, DOWN, group=group))
                if op is fo.mlp
                else lambda op=op: op(X, W, group=group)
            )
            if rank == index % 3:
                with loud(op.__name__, error=(ValueError, TypeError)):
                    wrong(group)
            else:
                with loud(f"refused by rank {index % 3}", error=fo.PeerError):
                    right()
        usable(rank, group)

    run_ranks(3, main)


def test_bad_arguments_of_all_ranks_and_without_gradients():
    def main(rank, group):
        with loud(error=ValueError):
            ag(X, ONES(3, 5), group=group)
        with torch.no_grad(), loud(error=ValueError) if rank else contextmanager(lambda: iter([None]))():
            arg(X, ONES(3, 5) if rank else W, group=group)  # says nothing to the peers, so they wait for no word
        usable(rank, group)

    run_ranks(2, main)


@pytest.mark.parametrize("op", [ag, rs, ar, arg, lambda x, w, group: fo.mlp(x, w, DOWN, group=group)])
@pytest.mark.parametrize(
    ("group", "error"),
    [(None, ValueError), (dist.GroupMember.NON_GROUP_MEMBER, ValueError), ("tp", TypeError), (0, TypeError)],
    ids=str,
)
def test_what_is_no_group_is_refused(op, group, error):
    with pytest.raises(error):
        op(X, W, group=group)


@pytest.fixture
def world_of_four():
    """Rank 3 of four, none of which talks."""
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_groups_that_do_not_serve_are_refused(world_of_four):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for group, says in (
        (mesh, r"2 dimensions \(2, 2\)"),
        (DeviceMesh("cpu", [0, 1]), "not a member"),
        (dist.new_group([0, 1]), "not a member"),
    ):
        with pytest.raises(ValueError, match=says):
            ag(X, W, group=group)


def test_the_group_must_be_given():
    with pytest.raises(TypeError, match="group"):
        ag(X, W)  # pyright: ignore[reportCallIssue]


# --- C02, C03: sums ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_c02_the_same_bits_call_after_call_and_rank_after_rank(dtype):
    x, w = torch.randn(61, 256).to(dtype), torch.randn(128, 256).to(dtype)

    def main(rank, group):
        dice = random.Random(rank)
        own, weight = shard(x, 1, rank, 4), shard(w, 1, rank, 4)
        found = []
        for overlap in MODES:
            first = fo.linear_all_reduce(own, weight, group=group, overlap=overlap)
            scattered = fo.linear_reduce_scatter(own, weight, group=group, overlap=overlap)
            for _ in range(20 if overlap == MODES[0] else 4):
                time.sleep(dice.random() * 0.005)
                assert torch.equal(first, fo.linear_all_reduce(own, weight, group=group, overlap=overlap)), overlap
                again = fo.linear_reduce_scatter(own, weight, group=group, overlap=overlap)
                assert torch.equal(scattered, again), overlap
            found.append(first)
        return found

    for overlap, *ranks in zip(MODES, *run_ranks(4, main), strict=True):
        assert all(torch.equal(ranks[0], other) for other in ranks[1:]), overlap


def test_c02_replicated_parameters_stay_equal_over_training():
    x, wide, narrow = torch.randn(10, 16), torch.randn(32, 16), torch.randn(16, 32)

    def main(rank, group):
        norm = torch.nn.LayerNorm(16)
        up, down = shard(wide, 0, rank, 4).requires_grad_(), shard(narrow, 1, rank, 4).requires_grad_()
        bias = torch.zeros(16, requires_grad=True)
        optimizer = torch.optim.SGD([*norm.parameters(), up, down, bias], lr=0.01)
        dice = random.Random(rank)
        for _ in range(50):
            time.sleep(dice.random() * 0.001)
            hidden = fo.all_reduce_grad_linear(norm(x), up, group=group).relu()
            fo.linear_all_reduce(hidden, down, bias, group=group).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*norm.parameters(), bias]

    first, *others = run_ranks(4, main)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_c03_partials_are_added_in_float32_and_rounded_once(n, dtype):
    large = 256.0 if dtype == torch.bfloat16 else 2048.0  # where adding one is lost
    want = torch.tensor(large + n - 1).to(dtype)
    assert dtype != torch.bfloat16 or want == {4: 260.0, 8: 264.0}[n]

    def main(rank, group):
        x, w = ONES(2 * n + 1, 1, dtype=dtype) * (large if rank == 0 else 1.0), ONES(3, 1, dtype=dtype)
        for overlap in MODES:
            for op in (rs, ar):
                assert bool((op(x, w, group=group, overlap=overlap) == want).all()), (overlap, op)

    run_ranks(n, main)


def test_c43_a_sum_is_not_a_mean():
    def main(rank, group):
        z = fo.linear_reduce_scatter(ONES(4, 3), ONES(6, 3), group=group)
        assert torch.equal(z, torch.full((2, 6), 6.0))

    run_ranks(2, main)


# --- C04: rows that the ranks do not divide ---------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [10, 5, 9, 3, 1])
def test_c04_sequences_that_the_ranks_do_not_divide(rows):
    problems = [Problem(MLP, (2, rows, 16)), Problem(COLUMN, (2, rows, 16)), Problem(ROW, (2, rows, 16))]

    def main(rank, group):
        for problem in problems:
            problem.check(rank, group)

    run_ranks(4, main)


def test_c04_another_rule_of_splitting_is_refused():
    def main(rank, group):
        part = ONES(10, 6).chunk(4)[rank]  # 3, 3, 3, 1 where tensor_split gives 3, 3, 2, 2
        with loud("[3, 3, 3, 1]", "[3, 3, 2, 2]", error=ValueError):
            ag(part, W, group=group)
        usable(rank, group)

    run_ranks(4, main)


# --- C06, C07: strides ------------------------------------------------------------------------------------------------

LOSSES = {
    "sum": lambda out: out.sum(),
    "mean": lambda out: out.mean(),
    "transposed": lambda out: out.t().sum(),
    "expanded": lambda out: (out.sum(0, keepdim=True).expand(3, -1) * 2).sum(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_c06_gradients_of_stride_0(loss):
    def main(rank, group):
        for op in (COLUMN, ROW, ALL_REDUCE, ALL_REDUCE_GRAD, MLP):
            problem = Problem(op, (8, 8), 0)
            leaves = {name: full.clone().requires_grad_() for name, full in problem.full.items()}
            whole = op.unsharded(leaves)
            # the sum over ranks of local losses: a local mean weighs its own elements
            how = {ROWS: 0}.get(op.out, op.out)
            parts = [whole] if how is None else whole.tensor_split(2, how)
            sum(loss(part) for part in parts).backward()
            for overlap in MODES:
                tensors = problem.shards(rank, 2)
                loss(op.sharded(tensors, group=group, dim=0, overlap=overlap)).backward()
                for name, tensor in tensors.items():
                    want = shard(leaves[name].grad, op.shards[name], rank, 2, 0)
                    torch.testing.assert_close(tensor.grad, want, atol=1e-10, rtol=1e-10, msg=f"{op} {name} {overlap}")

    run_ranks(2, main)


def _every_other(tensor):
    wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 77.0)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def _of_a_larger_one(tensor):
    wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 3), 77.0)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def _transposed(tensor):
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


@pytest.mark.parametrize("lay", [_every_other, _of_a_larger_one, _transposed])
def test_c07_strided_inputs_and_weights(lay):
    problems = [Problem(op, shape, dim) for op in OPERATORS for shape, dim in (((7, 8), 0), ((2, 3, 8), -2))]

    def main(rank, group):
        for problem in problems:
            for overlap in MODES:
                problem.check(rank, group, overlap, lay=lay)

    run_ranks(2, main)


# --- C08, C18: biases and norms ---------------------------------------------------------------------------------------


def test_c08_the_bias_of_a_row_layer_has_the_same_gradient_on_all_ranks():
    torch.manual_seed(3)
    x, up, down = torch.randn(2, 8, 16), torch.randn(32, 16), torch.randn(16, 32)
    seed = torch.randn(2, 8, 16)

    def forward(x, norm, bias, column, row):
        return row(F.gelu(column(norm(x))), bias)

    def parameters():
        return torch.nn.LayerNorm(16), torch.zeros(16, requires_grad=True)

    norm, bias = parameters()
    forward(x, norm, bias, lambda h: F.linear(h, up), lambda h, b: F.linear(h, down, b)).backward(seed)

    def main(rank, group):
        own_norm, own_bias = parameters()
        own_up, own_down = shard(up, 0, rank, 4), shard(down, 1, rank, 4)
        out = forward(
            shard(x, 1, rank, 4),
            own_norm,
            own_bias,
            lambda h: ag(h, own_up, group=group),
            lambda h, b: rs(h, own_down, b, group=group),
        )
        out.backward(shard(seed, 1, rank, 4))
        torch.testing.assert_close(own_bias.grad, bias.grad)
        # a norm between sharded rows sees its own rows only: its gradients are to be summed, which is the caller's
        partial = [parameter.grad for parameter in own_norm.parameters()]
        for part, whole in zip(partial, norm.parameters(), strict=True):
            group.allreduce([part]).wait()
            torch.testing.assert_close(part, whole.grad)
        return own_bias.grad

    first, *others = run_ranks(4, main)
    assert all(torch.equal(first, other) for other in others)


def test_c18_a_bias_is_added_once_and_its_gradient_is_not_divided():
    bias = torch.tensor([100.0, 200.0, 300.0])
    modes = [*MODES, *(fo.Overlap("flash", pattern=p, splits=s) for p in ("direct", "ring") for s in (3, 4, 8))]
    modes += [fo.Overlap("slice", slices=slices) for slices in (1, 2, 8)]

    def main(rank, group):
        x, w = torch.randn(8, 2), torch.zeros(3, 2)
        for overlap in modes:
            for op in (rs, ar):
                b = bias.clone().requires_grad_()
                out = op(x, w, b, group=group, overlap=overlap)
                assert torch.equal(out, bias.expand(2 if op is rs else 8, 3)), overlap
                out.sum().backward()
                assert torch.equal(b.grad, torch.full((3,), 8.0)), overlap
            up, down, b = torch.zeros(5, 2), torch.zeros(3, 5), bias.clone().requires_grad_()
            out = fo.mlp(x[:2], up, down, down_bias=b, group=group, overlap=overlap)
            assert torch.equal(out, bias.expand(2, 3)), overlap
            out.sum().backward()
            assert torch.equal(b.grad, torch.full((3,), 8.0)), overlap

    run_ranks(4, main)


# --- C09: gradients that nobody asked for -----------------------------------------------------------------------------


@pytest.mark.parametrize("wants", [["x"], ["w"], ["b"], ["x", "b"]], ids=str)
def test_c09_frozen_weights_and_first_layers(wants):
    problems = [Problem(op, (6, 5), 0, wants=wants) for op in (COLUMN, ROW, ALL_REDUCE, ALL_REDUCE_GRAD)]

    def main(rank, group):
        for problem in problems:
            for overlap in MODES:
                problem.check(rank, group, overlap)

    run_ranks(2, main)


def test_c09_a_frozen_weight_is_not_gathered_for():
    fo.report().clear()
    run_ranks(2, lambda rank, group: Problem(COLUMN, (8, 4), 0, wants=["x"]).check(rank, group))
    run_ranks(2, lambda rank, group: Problem(COLUMN, (8, 4), 0, wants=["b"]).check(rank, group))
    (backward,) = [record for record in fo.report() if record.op.endswith("backward")]
    assert backward.bytes == 2 * 4 * 4 * 8  # dx alone; for the bias nothing moves


@pytest.mark.parametrize("op", OPERATORS, ids=str)
def test_c09_d_a_gradient_wanted_on_one_rank_only_is_loud(op):
    wanted, frozen = Problem(op, (6, 5), 0), Problem(op, (6, 5), 0, wants=[n for n in op.shards if n != "x"])

    def main(rank, group):
        with loud("grads=", error=ValueError):
            (frozen if rank else wanted).run(rank, group)
        usable(rank, group)

    run_ranks(2, main)


@pytest.mark.parametrize(
    ("wants", "columns"),
    [
        (["x"], 5 + 7),  # dz is gathered, dx scattered
        (["x", "up_bias", "gate_bias"], 5 + 7),
        (["x", "down", "down_bias"], 5 + 7),
        (["x", "up"], 5 + 5 + 7),  # and x gathered
        (["down_bias"], 7),
        (["up"], 5 + 7),
    ],
    ids=str,
)
def test_c09_an_mlp_moves_only_what_the_gradients_need(wants, columns):
    rows, item = 8, 8
    fo.report().clear()
    run_ranks(2, lambda rank, group: Problem(MLP, (rows, 5), 0, wants=wants).check(rank, group))
    (backward,) = [record for record in fo.report() if record.op == "mlp backward"]
    assert backward.bytes == rows * columns * item


def test_without_gradients_no_fresh_memory_is_kept_for_backward():
    def main(rank, group):
        weights = [ONES(64, 8, requires_grad=True), ONES(8, 64, requires_grad=True)]
        with torch.no_grad():
            for _ in range(3):
                fo.mlp(ONES(32, 8), *weights, group=group)
        return transport_of(group).staging.bytes

    hidden = 2 * 32 * 64 * 4
    assert min(run_ranks(2, main)) > hidden // 2  # hidden rows lie in staging, of own and of one other piece


# --- C21: dtypes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_c21_every_tensor_gets_a_gradient_of_its_own_dtype(dtype):
    problems = [Problem(op, (6, 8), 0, dtype=dtype) for op in OPERATORS]

    def main(rank, group):
        for problem in problems:
            outputs, tensors = problem.run(rank, group)
            assert all(output.dtype == dtype for output in outputs)
            assert all(tensor.grad.dtype == dtype for tensor in tensors.values())

    run_ranks(2, main)


def test_c21_what_travels_has_the_dtype_of_the_tensors():
    def main(rank, group):
        rs(ONES(8, 4, dtype=torch.bfloat16), ONES(4, 4, dtype=torch.bfloat16), group=group)

    fo.report().clear()
    run_ranks(2, main)
    assert fo.report()[0].bytes == 2 * 4 * 4 * 2


# --- C22: memory ------------------------------------------------------------------------------------------------------


def test_c22_the_own_rows_are_saved_and_staging_does_not_grow():
    n, rows, features, layers = 4, 256, 32, 4

    def main(rank, group):
        saved = {}
        weights = [torch.randn(features // n, features, requires_grad=True) for _ in range(2 * layers)]
        known = {weight.data_ptr() for weight in weights}
        sizes = []
        for _ in range(6):
            x = torch.randn(rows // n, features, requires_grad=True)
            saved.clear()
            with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: saved.setdefault(tensor.data_ptr(), tensor), lambda tensor: tensor
            ):
                h = x
                for w in weights[:layers]:
                    h = rs(ag(h, w, group=group), w.t().contiguous().detach(), group=group) * 0.1
            kept = sum(t.nbytes for pointer, t in saved.items() if pointer not in known and t.shape[-1] == features)
            h.sum().backward()
            sizes.append(transport_of(group).staging.bytes)
        # per layer: own rows of x; the row layer's weight and its local input have other shapes
        assert kept <= layers * (rows // n) * features * 4 * 1.5
        assert len(set(sizes[1:])) == 1, sizes

    run_ranks(n, main)


@pytest.mark.parametrize("overlap", MODES, ids=str)
def test_c22_staging_is_flat_for_every_operator(overlap):
    problems = [Problem(op, (30, 8), 0) for op in OPERATORS]

    def main(rank, group):
        sizes = []
        for _ in range(5):
            for problem in problems:
                problem.run(rank, group, overlap)
            sizes.append(transport_of(group).staging.bytes)
        assert len(set(sizes[1:])) == 1, sizes

    run_ranks(2, main)


# --- C31: tensor parallelism without sequence parallelism -------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3])
def test_c31_the_gradient_of_the_input_is_whole_on_every_rank(n):
    torch.manual_seed(4)
    x, up, down, seed = (torch.randn(*s, dtype=torch.float64) for s in ((2, 5, 8), (13, 8), (8, 13), (2, 5, 8)))
    leaf = x.clone().requires_grad_()
    (out := F.linear(F.gelu(F.linear(leaf, up)), down)).backward(seed)

    def main(rank, group):
        for overlap in MODES:
            own = x.clone().requires_grad_()
            hidden = F.gelu(arg(own, shard(up, 0, rank, n), group=group, overlap=overlap))
            found = ar(hidden, shard(down, 1, rank, n), group=group, overlap=overlap)
            found.backward(seed)
            torch.testing.assert_close(found, out, atol=1e-10, rtol=1e-10)
            torch.testing.assert_close(own.grad, leaf.grad, atol=1e-10, rtol=1e-10)

    run_ranks(n, main)


# --- several calls in flight ------------------------------------------------------------------------------------------

PAIRS = [(COLUMN, ROW), (MLP, MLP), (QKV, ALL_REDUCE_GRAD), (ALL_REDUCE, ALL_REDUCE)]


@pytest.mark.parametrize("order", ["ABBA", "ABAB"])
def test_two_modules_and_two_steps_in_flight(order):
    pairs = [(Problem(a, (7, 5), 0, seed=1), Problem(b, (9, 5), 0, seed=2)) for a, b in PAIRS]

    def main(rank, group):
        for pair in pairs:
            made = []
            for problem in pair:
                tensors = problem.shards(rank, 3)
                outputs = problem.op.sharded(tensors, group=group, dim=0)
                made.append((problem, tensors, outputs if isinstance(outputs, tuple) else (outputs,)))
            for problem, tensors, outputs in made if order == "ABAB" else reversed(made):
                torch.autograd.backward(outputs, [shard(seed, problem.op.out, rank, 3, 0) for seed in problem.seeds])
                problem.compare(rank, 3, outputs, tensors)

    run_ranks(3, main)


@pytest.mark.parametrize("op", [COLUMN, ROW, ALL_REDUCE_GRAD, MLP], ids=str)
def test_backwards_in_another_order_on_one_rank_are_loud_even_if_they_look_alike(op):
    def main(rank, group):
        problem = Problem(op, (6, 5), 0)
        outputs = [op.sharded(problem.shards(rank, 2), group=group, dim=0) for _ in range(2)]
        for output in outputs if rank == 0 else reversed(outputs):
            with loud("of call", error=ValueError):
                output.sum().backward()
        usable(rank, group)

    run_ranks(2, main)


def test_backward_after_a_failed_call_is_loud():
    def main(rank, group):
        calls = []

        def fails(rows):
            calls.append(len(rows))
            if len(calls) > 1:  # not when it is tried out
                raise OverflowError("too large")
            return rows

        x = torch.randn(2, 6, requires_grad=True)
        y = ag(x, W, group=group)
        with pytest.raises((OverflowError, fo.PeerError)):
            fo.mlp(X[:2], UP, DOWN, activation=fails, group=group)
        with loud(error=fo.PeerError):
            y.sum().backward()
        usable(rank, group)

    run_ranks(2, main)


def test_thousands_of_calls_do_not_meet():
    def main(rank, group):
        w = ONES(1, 1)
        for call in range(1500):  # of each
            assert ag(torch.full((1, 1), float(call + rank)), w, group=group).flatten().tolist() == [call, call + 1]
            assert rs(torch.full((2, 1), float(call + rank)), w, group=group).item() == 2 * call + 1

    run_ranks(2, main)


def test_the_users_own_messages_are_left_alone():
    def main(rank, group):
        tags = [0, 1, 2, 3, 4, 16, 17, 18, 1000]
        other = 1 - rank
        receives = [(torch.zeros(2), tag) for tag in tags]
        works = [group.recv([buffer], other, tag) for buffer, tag in receives]
        for op in (COLUMN, MLP):
            Problem(op, (9, 5), 0).check(rank, group)
        sends = [group.send([torch.full((2,), 100.0 * rank + tag)], other, tag) for tag in tags]
        usable(rank, group)
        for work in works + sends:
            work.wait()
        for buffer, tag in receives:
            assert buffer.tolist() == [100.0 * other + tag] * 2

    run_ranks(2, main)


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True])
def test_c37_two_threads_on_one_group_are_loud(warm):
    def main(rank, group):
        errors = []
        if warm:
            ag(X, W, group=group)
        start = threading.Barrier(2)

        def work(width):
            try:
                start.wait()
                for _ in range(200):
                    ag(X, ONES(width, 6), group=group)
            except (RuntimeError, ValueError) as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(width,)) for width in (3, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    for errors in run_ranks(2, main, timeout_s=5):
        assert errors


def test_c37_two_threads_on_groups_of_their_own():
    def main(rank, group):
        for _ in range(5):
            usable(rank, group)

    threads = [threading.Thread(target=run_ranks, args=(2, main)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_an_operator_within_an_activation_is_loud():
    def main(rank, group):
        with pytest.raises(RuntimeError, match="another operator is running"):
            fo.mlp(X, UP, DOWN, activation=lambda rows: ar(rows, ONES(3, 3), group=group), group=group)
        usable(rank, group)

    run_ranks(2, main)
