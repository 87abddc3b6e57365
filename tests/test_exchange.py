import pytest
import torch

import flashoverlap.torch as fo
from ranks import run_ranks
from unsharded import MODES, ROWS, SHAPES, Operator, Problem, shard

TERMS = 5  # that are spread over the ranks and summed


def _alone(t):
    return t["x"]


def _terms(shape):
    return {"x": (TERMS, *shape)}


def _sum_of_terms(t):
    return t["x"].sum(0)


ALL_GATHER = Operator(
    "all_gather", {"x": ROWS}, lambda shape: {"x": shape}, _alone, lambda t, **kw: fo.all_gather(t["x"], **kw), None
)
SPLIT = Operator("split", {"x": None}, ALL_GATHER.sizes, _alone, lambda t, **kw: fo.split(t["x"], **kw), ROWS)
REDUCE_SCATTER = Operator(
    "reduce_scatter",
    {"x": 0},
    _terms,
    _sum_of_terms,
    lambda t, **kw: fo.reduce_scatter(t["x"].sum(0), **kw),
    ROWS,
)
ALL_REDUCE = Operator(
    "all_reduce",
    {"x": 0},
    _terms,
    _sum_of_terms,
    lambda t, dim, **kw: fo.all_reduce(t["x"].sum(0), **kw),
    None,
)
SUM_GRADIENT = Operator(
    "sum_gradient",
    {"x": ROWS, "weight": None},
    lambda shape: {"x": shape, "weight": shape[-1:]},
    lambda t: t["x"] * t["weight"],
    lambda t, dim, **kw: t["x"] * fo.sum_gradient(t["weight"], **kw),
    ROWS,
)
MOVING = (ALL_GATHER, SPLIT, REDUCE_SCATTER)
EXCHANGES = (*MOVING, ALL_REDUCE, SUM_GRADIENT)

each_exchange = pytest.mark.parametrize("op", EXCHANGES, ids=str)


def check_all(world_size, problems, modes=MODES, tolerance=1e-10, **more):
    def main(rank, group):
        for problem in problems:
            for overlap in modes:
                problem.check(rank, group, overlap, tolerance, **more)

    run_ranks(world_size, main)


# --- values and gradients ---------------------------------------------------------------------------------------------


@each_exchange
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_values_and_gradients(op, n):
    check_all(n, [Problem(op, shape, dim) for shape, dim in SHAPES])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (7,), (20001,), (129, 131), (2, 0, 3), (3, 9001, 1)], ids=str)
def test_sums_take_any_number_of_dimensions_and_give_all_ranks_the_same_bits(shape, n):
    """Both small ones, exchanged whole, and large ones, summed in pieces."""

    def main(rank, group):
        x = torch.randn(shape, requires_grad=True)
        term, seed = x.detach().clone(), torch.randn(shape, generator=torch.Generator().manual_seed(1))
        sums, gradients = [], []
        for overlap in MODES:
            total = fo.all_reduce(x, group=group, overlap=overlap)
            (gradient,) = torch.autograd.grad(total, x, seed)
            assert torch.equal(gradient, seed)
            sums.append(total.detach())
            (gradient,) = torch.autograd.grad(fo.sum_gradient(x, group=group, overlap=overlap), x, term)
            gradients.append(gradient)
        return term, sums, gradients

    terms, *found = zip(*run_ranks(n, main), strict=True)
    want = torch.stack([term.double() for term in terms]).sum(0)
    for by_rank in found:
        for results in zip(*by_rank, strict=True):
            assert all(torch.equal(result, results[0]) for result in results)
            torch.testing.assert_close(results[0].double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@each_exchange
def test_other_dtypes(op, dtype):
    if op in (REDUCE_SCATTER, ALL_REDUCE):
        op = op._replace(sizes=lambda shape: {"x": (3, *shape)})  # one a rank: what sums them is the operator alone
    check_all(3, [Problem(op, (2, 7, 5), dtype=dtype)], tolerance=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("shape", [(40,), (300, 120)], ids=["whole", "in pieces"])
def test_half_precision_is_added_in_float32_and_rounded_once(shape):
    def main(rank, group):
        x = torch.randn(shape).bfloat16()
        return x, [fo.all_reduce(x, group=group, overlap=overlap) for overlap in MODES]

    terms, sums = zip(*run_ranks(4, main), strict=True)
    want = torch.stack([term.double() for term in terms]).sum(0)
    for found in (found for by_mode in sums for found in by_mode):
        bound = want.abs() * torch.finfo(torch.bfloat16).eps / 2 + 1e-5
        assert bool(((found.double() - want).abs() <= bound).all())


@each_exchange
def test_strided_inputs(op):
    check_all(3, [Problem(op, (2, 7, 5))], lay=lambda tensor: torch.stack([tensor, tensor], -1)[..., 0])
    check_all(3, [Problem(op, (7, 5), 0)], lay=lambda tensor: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor)


@each_exchange
def test_expanded_gradients(op):
    problem = Problem(op, (2, 7, 5))

    def main(rank, group):
        for overlap in MODES:
            tensors = problem.shards(rank, 3)
            op.sharded(tensors, group=group, dim=-2, overlap=overlap).sum().backward()
            full = {name: tensor.clone().requires_grad_() for name, tensor in problem.full.items()}
            op.unsharded(full).sum().backward()
            for name, tensor in tensors.items():
                torch.testing.assert_close(tensor.grad, shard(full[name].grad, op.shards[name], rank, 3))

    run_ranks(3, main)


@each_exchange
def test_the_output_may_be_changed_in_place(op):
    problem = Problem(op, (7, 5), 0)

    def main(rank, group):
        tensors = problem.shards(rank, 2)
        output = op.sharded(tensors, group=group, dim=0)
        output += 1
        output.backward(shard(problem.seeds[0], op.out, rank, 2, 0))
        problem.compare(rank, 2, (output - 1,), tensors)

    run_ranks(2, main)


@each_exchange
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_gradients_and_then_with(op, without):
    problems = [
        (Problem(op, shape, dim), Problem(op, shape, dim, forward_only=True))
        for shape, dim in (((2, 7, 5), -2), ((7, 5), 0), ((6, 5), 0))  # equal shards take another way in "collective"
    ]

    def main(rank, group):
        for overlap in MODES:
            for problem, quiet in problems:
                with without():
                    output = op.sharded(problem.shards(rank, 3), group=group, dim=problem.dim, overlap=overlap)
                assert not output.requires_grad
                quiet.compare(rank, 3, (output,), {}, saying=f"{overlap}")
                problem.check(rank, group, overlap)

    run_ranks(3, main)


def test_split_and_all_gather_undo_each_other():
    def main(rank, group):
        x = torch.arange(55.0).view(11, 5).requires_grad_()
        there_and_back = fo.all_gather(fo.split(x, group=group), group=group)
        assert torch.equal(there_and_back, x)
        (gradient,) = torch.autograd.grad(there_and_back.square().sum(), x)
        assert torch.equal(gradient, 2 * x)

    run_ranks(3, main)


def test_a_sparse_gradient_is_summed():
    def main(rank, group):
        table = torch.zeros(6, 2, requires_grad=True)
        rows = torch.nn.functional.embedding(torch.tensor([rank]), fo.sum_gradient(table, group=group), sparse=True)
        rows.sum().backward()
        assert table.grad.sum(1).tolist() == [2.0, 2.0, 0.0, 0.0, 0.0, 0.0]

    run_ranks(2, main)


# --- what moves -------------------------------------------------------------------------------------------------------


def sent(world_size, function):
    """Bytes that all ranks send in all, by operator and pass."""
    fo.report().clear()
    run_ranks(world_size, function)
    return {record.op: record.bytes for record in fo.report() if record.bytes}


def test_a_replicated_gradient_moves_nothing():
    for op, name, rows in ((ALL_GATHER, "all_gather", 1), (ALL_REDUCE, "all_reduce", 2)):
        problem = Problem(op, (8, 5), 0)
        # of one call site: gather half the rows on two ranks each, or exchange whole tensors
        assert sent(2, problem.check) == {name: rows * 8 * 5 * 8}


def test_what_wants_no_gradient_moves_nothing():
    def main(rank, group):
        frozen, counts = torch.ones(3), torch.ones(3, dtype=torch.int64)
        for x in (frozen, counts, frozen.bool(), torch.nn.Parameter(frozen, requires_grad=False)):
            assert fo.sum_gradient(x, group=group) is x
        weight = torch.nn.Parameter(frozen)
        with torch.no_grad():
            assert fo.sum_gradient(weight, group=group) is weight
            fo.split(torch.ones(4, 2), group=group)
        if rank == 0:  # forward moves nothing either, so that a rank may do without
            assert torch.equal(fo.sum_gradient(weight, group=group), weight)

    assert sent(2, main) == {}


# --- what is refused --------------------------------------------------------------------------------------------------


@each_exchange
def test_a_second_derivative_is_refused(op):
    problem = Problem(op, (4, 5), 0)

    def main(rank, group):
        tensors = problem.shards(rank, 2)
        last = list(tensors)[-1]
        loss = op.sharded(tensors, group=group, dim=0).square().sum()
        (grad,) = torch.autograd.grad(loss, tensors[last], create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives"):
            grad.square().sum().backward()

    run_ranks(2, main)


@pytest.mark.parametrize("op", [*MOVING, ALL_REDUCE], ids=str)
def test_ranks_that_disagree_are_all_told(op):
    def main(rank, group):
        x = torch.ones(1, 4, 5 + rank, requires_grad=True)
        with pytest.raises(ValueError, match=r"(?s)disagree.*5\].*6\]"):
            op.sharded({"x": x}, group=group, dim=-2)
        Problem(op, (9, 5), 0).check(rank, group)

    run_ranks(2, main)


def test_gradients_that_differ_are_refused_in_backward():
    def main(rank, group):
        weight = torch.ones(4 + rank, requires_grad=True)
        with pytest.raises(ValueError, match=r"(?s)disagree.*\[4\].*\[5\]"):
            fo.sum_gradient(weight, group=group).sum().backward()
        one, other = (torch.ones(4, requires_grad=True) for _ in range(2))
        first = fo.sum_gradient(one, group=group)
        fo.all_reduce(torch.ones(3), group=group)
        second = fo.sum_gradient(other, group=group)
        with pytest.raises(ValueError, match="after 1 calls"):
            (first, second)[rank].sum().backward()
        Problem(SUM_GRADIENT, (9, 5), 0).check(rank, group)

    run_ranks(2, main)


@pytest.mark.parametrize("op", [fo.all_gather, fo.split, fo.reduce_scatter], ids=lambda op: op.__name__)
@pytest.mark.parametrize(
    ("x", "dim", "error", "says"),
    [
        (torch.ones(4), 0, ValueError, "two dimensions"),
        (torch.ones(4, 5), 1, ValueError, "features"),
        (torch.ones(4, 5), 2, ValueError, "does not exist"),
        (torch.ones(4, 5), None, TypeError, "dim"),
        (torch.ones(4, 5).int(), 0, TypeError, "int32"),
        ([1.0], 0, TypeError, "list"),
    ],
    ids=str,
)
def test_arguments_that_cannot_work(op, x, dim, error, says):
    def main(rank, group):
        with pytest.raises(error, match=says):
            op(x, group=group, dim=dim)
        Problem(ALL_GATHER, (9, 5), 0).check(rank, group)

    run_ranks(2, main)


@pytest.mark.parametrize("op", [fo.all_reduce, fo.sum_gradient], ids=lambda op: op.__name__)
def test_sums_of_what_cannot_be_summed(op):
    def main(rank, group):
        for x, says in (([1.0], "list"), (torch.ones(2, dtype=torch.complex64, requires_grad=True), "complex64")):
            with pytest.raises(TypeError, match=says):
                op(x, group=group)
        with pytest.raises(TypeError, match="Overlap"):
            op(torch.ones(2), group=group, overlap="off")
        Problem(ALL_REDUCE, (9, 5), 0).check(rank, group)

    run_ranks(2, main)


def test_rows_of_another_split_are_refused():
    def main(rank, group):
        with pytest.raises(ValueError, match=r"tensor_split"):
            fo.all_gather(torch.ones(3 + rank, 5), group=group)
        Problem(ALL_GATHER, (9, 5), 0).check(rank, group)

    run_ranks(2, main)
