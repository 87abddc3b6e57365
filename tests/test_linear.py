import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashoverlap.torch as fo
from flashoverlap.torch import call
from ranks import run_ranks
from unsharded import (
    ALL_REDUCE,
    ALL_REDUCE_GRAD,
    ALL_REDUCE_GRAD_QKV,
    COLUMN,
    LINEARS,
    MODES,
    QKV,
    ROW,
    SHAPES,
    Problem,
    shard,
)


def check_all(world_size, problems, modes=MODES, tolerance=1e-10, **more):
    """Every problem in every mode, on one group; where they are many, every other mode, each in turn."""

    def main(rank, group):
        for index, problem in enumerate(problems):
            for overlap in modes if world_size < 4 else modes[index % 2 :: 2]:
                problem.check(rank, group, overlap, tolerance, **more)

    run_ranks(world_size, main)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("op", LINEARS, ids=str)
def test_values_and_all_gradients(op, n):
    shapes = SHAPES if n < 8 else SHAPES[:2] + SHAPES[3:4]
    check_all(n, [Problem(op, shape, dim) for shape, dim in shapes])


@pytest.mark.parametrize("op", LINEARS, ids=str)
def test_float32(op):
    check_all(3, [Problem(op, (2, 9, 16), dtype=torch.float32)], MODES, 1e-5)


# --- few rows: pieces of features -------------------------------------------------------------------------------------


@pytest.fixture
def along_features(monkeypatch):
    """Cuts all sums of products along features, however many rows there are."""

    def choose(overlap, op, rows, *, sizes=None, **more):
        choice = chosen(overlap, op, rows, sizes=sizes, **more)
        turns = op.startswith("all_reduce") and "out" in (sizes or {}) and choice.mode != "collective"
        return choice._replace(along="features") if turns else choice

    chosen = call.choose
    monkeypatch.setattr(call, "choose", choose)


FEW = (((1, 5), 0), ((2, 1, 9), -2), ((3, 5), -2), ((0, 5), 0), ((17, 5), 0))  # one row; none; more than features
SUMMED = (ALL_REDUCE, ALL_REDUCE_GRAD, ALL_REDUCE_GRAD_QKV)


@pytest.mark.parametrize("n", [2, 3, 8])  # eight have fewer features than ranks, too
@pytest.mark.parametrize("op", SUMMED, ids=str)
def test_pieces_of_features(op, n, along_features):
    fo.report().clear()
    shapes = FEW if n < 8 else FEW[:3]
    check_all(n, [Problem(op, shape, dim) for shape, dim in shapes])
    moved = [record for record in fo.report() if record.mode_taken == "flash"]
    assert {record.op for record in moved} <= {"linear_all_reduce", "all_reduce_grad_linear backward"}
    assert moved
    assert all(record.detail.endswith("along features") for record in moved)


@pytest.mark.parametrize("op", SUMMED, ids=str)
def test_pieces_of_features_in_float32(op, along_features):
    check_all(3, [Problem(op, (9, 16), 0, dtype=torch.float32)], MODES, 1e-5)


def test_pieces_of_features_only_for_what_wants_a_gradient(along_features):
    problems = [Problem(op, (1, 5), 0, wants=wants) for op in SUMMED[:2] for wants in ("", "x", "w", "b", "xw", "wb")]
    check_all(2, problems)


@pytest.mark.parametrize("op", [ALL_REDUCE, ALL_REDUCE_GRAD], ids=str)
def test_pieces_of_features_in_half_precision(op, along_features):
    check_half_precision(op, torch.bfloat16)


def test_pieces_of_features_have_the_same_bits_on_all_ranks_again_and_again(along_features):
    problem = Problem(ALL_REDUCE, (4, 30), 0, dtype=torch.bfloat16, forward_only=True)

    def main(rank, group):
        return [
            [problem.run(rank, group, overlap)[0][0] for _ in range(2)] for overlap in MODES if overlap.mode == "flash"
        ]

    for first, *others in zip(*run_ranks(3, main), strict=True):
        for outputs in (first, *others):
            assert all(torch.equal(first[0], output) for output in outputs)


# --- half precision: the bounds of the numerics contract --------------------------------------------------------------


def partials(op, problem, n):
    """Sums over ranks of the absolute partials of what is summed over ranks, and of what is computed by one matmul."""
    full, seed = problem.full, problem.seeds[0]
    if op in (ROW, ALL_REDUCE):
        parts = [shard(full["x"], -1, r, n) @ shard(full["w"], 1, r, n).t() for r in range(n)]
        return {"output": sum(part.abs() for part in parts)}
    parts = [shard(seed, -1, r, n) @ shard(full["w"], 0, r, n) for r in range(n)]
    return {"x": sum(part.abs() for part in parts)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", [COLUMN, ROW, ALL_REDUCE, ALL_REDUCE_GRAD], ids=str)
def test_half_precision_rounds_each_partial_once_and_the_sum_once(op, dtype):
    check_half_precision(op, dtype)


def check_half_precision(op, dtype):
    n, unit = 4, torch.finfo(dtype).eps / 2
    problem = Problem(op, (18, 32), 0, dtype=dtype)
    summed = partials(op, problem, n)

    def within(found, want, name, how, rank):
        assert found.dtype == dtype
        terms = shard(summed[name], how, rank, n, 0) if name in summed else 0.0
        bound = 1.01 * unit * (want.abs() + terms) + 1e-5  # of float32 in between
        error = (found.double() - want).abs()
        assert bool((error <= bound).all()), (name, float((error / bound).max()))

    def main(rank, group):
        for overlap in MODES:
            (output,), tensors = problem.run(rank, group, overlap)
            within(output, shard(problem.outputs[0], op.out, rank, n, 0), "output", op.out, rank)
            for name, tensor in tensors.items():
                if name != "b":  # a sum of torch's own
                    want = shard(problem.grads[name], op.shards[name], rank, n, 0)
                    within(tensor.grad, want, name, op.shards[name], rank)

    run_ranks(n, main)


# --- what wants a gradient, and when ----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [COLUMN, ROW, ALL_REDUCE, ALL_REDUCE_GRAD], ids=str)
def test_only_what_wants_a_gradient_gets_one(op):
    subsets = [
        [name for name, on in zip("xwb", bits, strict=True) if on] for bits in itertools.product((0, 1), repeat=3)
    ]
    problems = [Problem(op, (2, 5, 5), wants=wants) for wants in subsets]
    check_all(2, problems)


@pytest.mark.parametrize("wants", [["x"], ["q"], ["k"], ["vb"], ["x", "k"]], ids="".join)
@pytest.mark.parametrize("op", [QKV, ALL_REDUCE_GRAD_QKV], ids=str)
def test_some_gradients_of_several_weights(op, wants):
    check_all(3, [Problem(op, (7, 5), 0, wants=wants)])


def test_several_weights_share_one_all_reduce():
    fo.report().clear()
    problems = [Problem(op, (8, 5), 0) for op in (ALL_REDUCE_GRAD, ALL_REDUCE_GRAD_QKV)]
    run_ranks(2, lambda rank, group: [problem.check(rank, group) for problem in problems])
    sent = [record.bytes for record in fo.report() if record.op == "all_reduce_grad_linear backward"]
    assert sum(sent) == 2 * 2 * 2 * 4 * 5 * 8  # two calls on two ranks scatter and gather four rows of five float64


@pytest.mark.parametrize("op", [fo.all_gather_linear, fo.all_reduce_grad_linear])
@pytest.mark.parametrize(("weights", "biases"), [(0, None), (2, 1), (1, 2), (2, "single")])
def test_weights_and_biases_that_do_not_pair_are_refused(op, weights, biases):
    biases = torch.ones(3) if biases == "single" else biases and [torch.ones(3)] * biases

    def main(rank, group):
        with pytest.raises(ValueError, match="empty sequence" if not weights else "one bias"):
            op(torch.ones(4, 5), [torch.ones(3, 5)] * weights, biases, group=group)

    run_ranks(2, main)


@pytest.mark.parametrize("op", [COLUMN, ROW, ALL_REDUCE, ALL_REDUCE_GRAD], ids=str)
def test_autograd_grad_for_one_tensor_at_a_time(op):
    problem = Problem(op, (7, 5), 0)

    def main(rank, group):
        tensors = problem.shards(rank, 2)
        output = op.sharded(tensors, group=group, dim=0)
        seed = shard(problem.seeds[0], op.out, rank, 2, 0)
        for name, tensor in tensors.items():
            (grad,) = torch.autograd.grad(output, tensor, seed, retain_graph=True)
            want = shard(problem.grads[name], op.shards[name], rank, 2, 0)
            torch.testing.assert_close(grad, want, atol=1e-10, rtol=1e-10)
        assert all(tensor.grad is None for tensor in tensors.values())

    run_ranks(2, main)


def test_gathered_rows_are_kept_on_request_and_then_not_gathered_again():
    check_all(3, [Problem(op, shape, dim) for op in (COLUMN, QKV) for shape, dim in SHAPES], save_gathered=True)


def test_kept_rows_save_the_second_gather():
    problem = Problem(COLUMN, (8, 5), 0)
    fo.report().clear()
    run_ranks(2, lambda rank, group: [problem.check(rank, group, save_gathered=keep) for keep in (False, True)])
    forward, backward = (
        [record.bytes for record in fo.report() if record.op == name]
        for name in ("all_gather_linear", "all_gather_linear backward")
    )
    gather = scatter = 2 * 4 * 5 * 8  # both ranks send four rows of five float64
    assert sum(forward) == 2 * gather
    assert sum(backward) == (gather + scatter) + scatter


@pytest.mark.parametrize("op", LINEARS, ids=str)
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("rows", [6, 7])
def test_without_gradients_and_then_with(op, without, rows):
    problem, quiet = Problem(op, (2, rows, 5)), Problem(op, (2, rows, 5), forward_only=True)

    def main(rank, group):
        for overlap in MODES:
            saved = []
            with without(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
                tensors = problem.shards(rank, 3)
                outputs = op.sharded(tensors, group=group, dim=-2, overlap=overlap)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            assert not any(output.requires_grad for output in outputs)
            assert not saved
            quiet.compare(rank, 3, outputs, {}, saying=f"{overlap}")
            problem.check(rank, group, overlap)  # with the staging that was made without

    run_ranks(3, main)


@pytest.mark.parametrize("op", LINEARS, ids=str)
def test_autocast(op):
    problem = Problem(op, (6, 8), 0, dtype=torch.bfloat16)
    exact = Problem(op, (6, 8), 0)

    def main(rank, group):
        plain, _ = problem.run(rank, group)
        tensors = {name: t.detach().float().requires_grad_() for name, t in problem.shards(rank, 2).items()}
        with torch.autocast("cpu", torch.bfloat16):
            outputs = op.sharded(tensors, group=group, dim=0)
            exact.check(rank, group)  # float64 is left alone, as by nn.Linear
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        assert all(map(torch.equal, outputs, plain))
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        assert all(tensor.grad.dtype == torch.float32 for tensor in tensors.values())

    run_ranks(2, main)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("op", LINEARS, ids=str)
def test_checkpointing(op, reentrant):
    problem = Problem(op, (7, 5), 0)

    def main(rank, group):
        tensors = problem.shards(rank, 3)
        names = list(tensors)

        def module(*values):
            return op.sharded(dict(zip(names, values, strict=True)), group=group, dim=0)

        outputs = checkpoint(module, *tensors.values(), use_reentrant=reentrant)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, [shard(seed, op.out, rank, 3, 0) for seed in problem.seeds])
        problem.compare(rank, 3, outputs, tensors)

    run_ranks(3, main)


@pytest.mark.parametrize("op", LINEARS, ids=str)
def test_the_output_may_be_changed_in_place(op):
    problem = Problem(op, (7, 5), 0)

    def main(rank, group):
        tensors = problem.shards(rank, 2)
        outputs = op.sharded(tensors, group=group, dim=0)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        for output in outputs:
            output += 1  # a residual
        torch.autograd.backward(outputs, [shard(seed, op.out, rank, 2, 0) for seed in problem.seeds])
        problem.compare(rank, 2, [output - 1 for output in outputs], tensors)

    run_ranks(2, main)


@pytest.mark.parametrize("op", [COLUMN, ROW, ALL_REDUCE, ALL_REDUCE_GRAD], ids=str)
def test_a_second_derivative_is_refused(op):
    problem = Problem(op, (4, 5), 0)

    def main(rank, group):
        tensors = problem.shards(rank, 2)
        output = op.sharded(tensors, group=group, dim=0)
        (grad,) = torch.autograd.grad(output.square().sum(), tensors["x"], create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives"):
            grad.square().sum().backward()

    run_ranks(2, main)


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's own, between two graph breaks
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_gives_the_eager_results(backend):
    column, row = Problem(COLUMN, (7, 5), 0), Problem(ROW, (7, 13), 0)

    def main(rank, group):
        x, w, b = column.shards(rank, 2).values()
        _, down, bias = row.shards(rank, 2).values()

        def module(x):
            hidden = fo.all_gather_linear(x * 2, w, b, group=group, dim=0).relu()
            return fo.linear_reduce_scatter(hidden, down, bias, group=group, dim=0).sin() * 3

        leaves = [x, w, b, down, bias]
        eager, compiled = module(x), torch.compile(module, backend=backend)(x)
        assert torch.equal(eager, compiled)
        pairs = zip(torch.autograd.grad(eager.sum(), leaves), torch.autograd.grad(compiled.sum(), leaves), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)

    run_ranks(2, main)


def test_compile_without_graph_breaks_is_refused_clearly():
    problem = Problem(COLUMN, (7, 5), 0)

    def main(rank, group):
        tensors = problem.shards(rank, 1)
        module = torch.compile(
            lambda: fo.all_gather_linear(*tensors.values(), group=group), backend="eager", fullgraph=True
        )
        with pytest.raises(Exception, match="all_gather_linear"):
            module()

    run_ranks(1, main)


def test_a_backward_inside_an_autocast_region_keeps_the_dtype_of_its_forward():
    def gradients(rank, group):
        x, w = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
        down = torch.randn(5, 6, requires_grad=True)
        h = fo.all_gather_linear(x, w, group=group)
        z = fo.linear_all_reduce(
            fo.all_reduce_grad_linear(h, h.new_ones(6, 6).requires_grad_(), group=group), down, group=group
        )
        outside = torch.autograd.grad(z.sum(), (x, w, down), retain_graph=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = torch.autograd.grad(z.sum(), (x, w, down))
        return all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))

    assert run_ranks(2, gradients) == [True, True]


@pytest.mark.parametrize("target", [0, 1])
def test_a_second_derivative_is_refused_whatever_it_is_taken_for(target):
    def penalty(rank, group):
        leaves = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
        refused = []
        for operator in (
            fo.all_gather_linear,
            fo.linear_reduce_scatter,
            fo.linear_all_reduce,
            fo.all_reduce_grad_linear,
        ):
            loss = operator(*leaves, group=group).pow(2).sum()
            gradients = torch.autograd.grad(loss, leaves, create_graph=True)
            with pytest.raises(RuntimeError, match="second derivatives"):
                torch.autograd.grad(loss + gradients[0].pow(2).sum(), leaves[target])
            refused.append(operator)
        return len(refused)

    assert run_ranks(2, penalty) == [4, 4]
