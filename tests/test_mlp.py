import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import flashoverlap.torch as fo
from flashoverlap.choice import Choice
from flashoverlap.torch import call
from ranks import named, run_ranks
from unsharded import HIDDEN, MLP, MODES, SHAPES, Problem, mlp_operator, shard

PLAIN = mlp_operator(gated=False)


def check_all(world_size, problems, modes=MODES, tolerance=1e-10):
    def main(rank, group):
        for index, problem in enumerate(problems):
            for overlap in modes if world_size < 4 else modes[index % 2 :: 2]:
                problem.check(rank, group, overlap, tolerance)

    run_ranks(world_size, main)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_values_and_all_gradients(gated, n):
    shapes = SHAPES if n < 8 else SHAPES[:2] + SHAPES[3:4]
    check_all(n, [Problem(MLP if gated else PLAIN, shape, dim) for shape, dim in shapes])


def row_wise(rows):
    return torch.softmax(rows, -1) * rows.square()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", torch.tanh, torch.nn.Softplus(), F.relu])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_activations(activation, gated):
    check_all(2, [Problem(mlp_operator(activation, gated), (7, 5), 0)])


def test_an_activation_may_work_row_by_row():
    # on one rank, since the hidden features of a row are spread over the ranks
    check_all(1, [Problem(mlp_operator(row_wise), (2, 7, 5))])


def test_an_activation_may_give_back_its_input():
    check_all(2, [Problem(mlp_operator(lambda rows: rows, gated), (7, 5), 0) for gated in (True, False)])


# --- layer by layer ---------------------------------------------------------------------------------------------------

LAYERS = [
    Choice(mode, pattern, splits, "planned", "the layers are faster by themselves")
    for mode, pattern, splits in (
        ("flash", "direct", 1),
        ("flash", "direct", 3),
        ("flash", "ring", 2),
        ("slice", "sliced", 2),
        ("off", "sliced", 1),
        ("collective", "collective", 1),
    )
]


@pytest.fixture
def per_layer(monkeypatch):
    """Runs every MLP layer by layer: of each run of a rank, the next two of the given layers."""
    chosen, given = call.choose, list(itertools.product(LAYERS, repeat=2))

    def choose(overlap, op, rows, **more):
        choice = chosen(overlap, op, rows, **more)
        if op not in ("mlp", "mlp_backward"):
            return choice
        layers = given[(overlap.splits or 0) % len(given)]
        return Choice("layers", "both", 1, "planned", "the layers are faster by themselves", layers=layers)

    monkeypatch.setattr(call, "choose", choose)
    return [fo.Overlap(splits=index) for index in range(1, len(given))]  # splits tell which layers


@pytest.mark.parametrize("op", [MLP, PLAIN], ids=["gated", "plain"])
def test_layer_by_layer(op, per_layer):
    check_all(3, [Problem(op, (2, 9, 5))], per_layer)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_layer_by_layer_on_other_numbers_of_ranks(n, per_layer):
    check_all(n, [Problem(MLP, shape, dim) for shape, dim in SHAPES if n < 8 or shape == (3, 5)], per_layer[::9])


def test_layer_by_layer_half_precision_and_frozen_tensors(per_layer):
    check_all(2, [Problem(MLP, (9, 16), 0, dtype=torch.float32)], per_layer[::5], 1e-5)
    check_all(2, [Problem(MLP, (9, 16), 0, dtype=torch.bfloat16, forward_only=True)], per_layer[::5], 0.1)
    for wants in (["x"], ["up"], ["down", "x"], ["gate_bias"]):
        check_all(2, [Problem(MLP, (5, 5), 0, wants=wants)], per_layer[:1])


def test_each_layer_has_a_record_of_its_own(per_layer):
    fo.report().clear()
    check_all(2, [Problem(MLP, (8, 5), 0)], [fo.Overlap(splits=11)])  # 3 splits, then the backend's own
    records = [(record.op, record.mode_taken, record.detail, record.calls) for record in fo.report()]
    both = [("flash", "direct x3", 2), ("collective", "", 2)]
    assert records == [(op, *layer) for op in ("mlp", "mlp backward") for layer in both]
    assert {record.reason for record in fo.report()} == {"the layers are faster by themselves"}


def test_an_activation_that_raises_on_one_rank_layer_by_layer(per_layer):
    test_an_activation_that_raises_on_one_rank_is_loud_on_all_and_the_group_lives(2)
    test_an_activation_that_raises_in_backward_on_one_rank()


# --- biases, and what wants a gradient --------------------------------------------------------------------------------

BIASES = ("up_bias", "gate_bias", "down_bias")


@pytest.mark.parametrize("count", range(4))
def test_every_combination_of_biases(count):
    for biases in itertools.combinations(BIASES, count):
        check_all(2, [Problem(mlp_operator(gated=gated, biases=biases), (2, 5, 5)) for gated in (True, False)])


@pytest.mark.parametrize("op", [MLP, PLAIN], ids=["gated", "plain"])
def test_every_combination_of_frozen_tensors(op):
    names = list(op.shards)
    subsets = itertools.product((False, True), repeat=len(names))
    problems = [
        Problem(op, (7, 5), 0, wants=[name for name, wanted in zip(names, bits, strict=True) if wanted])
        for bits in subsets
    ]

    def main(rank, group):
        for index, problem in enumerate(problems):
            problem.check(rank, group, MODES[index % len(MODES)])

    run_ranks(2, main)


@pytest.mark.parametrize("name", list(MLP.shards))
def test_autograd_grad_for_one_tensor_at_a_time(name):
    problem = Problem(MLP, (7, 5), 0)

    def main(rank, group):
        tensors = problem.shards(rank, 2)
        output = MLP.sharded(tensors, group=group, dim=0)
        (grad,) = torch.autograd.grad(output, tensors[name], shard(problem.seeds[0], 0, rank, 2))
        want = shard(problem.grads[name], MLP.shards[name], rank, 2, 0)
        torch.testing.assert_close(grad, want, atol=1e-10, rtol=1e-10)

    run_ranks(2, main)


def test_float32():
    check_all(3, [Problem(MLP, (2, 9, 5), dtype=torch.float32)], MODES, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", [MLP, PLAIN], ids=["gated", "plain"])
def test_half_precision_is_as_good_as_the_unsharded_module(op, dtype):
    problem = Problem(op, (30, 16), 0, dtype=dtype)
    plain = {name: full.to(dtype).requires_grad_() for name, full in problem.full.items()}
    output = op.unsharded(plain)
    output.backward(problem.seeds[0].to(dtype))
    wants = {"output": problem.outputs[0], **problem.grads}
    errors = {"output": output.detach(), **{name: leaf.grad for name, leaf in plain.items()}}
    errors = {name: float((found.double() - wants[name]).norm()) for name, found in errors.items()}
    hows = {"output": op.out, **op.shards}

    def main(rank, group):
        found = []
        for overlap in MODES:
            (output,), tensors = problem.run(rank, group, overlap)
            found.append({"output": output.detach(), **{name: tensor.grad for name, tensor in tensors.items()}})
        return found

    by_rank = run_ranks(3, main)
    for index, overlap in enumerate(MODES):
        for name, how in hows.items():
            parts = [by_rank[rank][index][name].double() for rank in range(3)]
            shards = [shard(wants[name], how, rank, 3, 0) for rank in range(3)]
            ours = sum(float((part - want).norm()) ** 2 for part, want in zip(parts, shards, strict=True)) ** 0.5
            ours /= 3**0.5 if how is None else 1  # every rank holds all
            assert ours <= 1.5 * errors[name], (overlap, name)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_gradients_and_then_with(without):
    problem, quiet = Problem(MLP, (2, 7, 5)), Problem(MLP, (2, 7, 5), forward_only=True)

    def main(rank, group):
        for overlap in MODES[::2]:
            saved = []
            with without(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
                output = MLP.sharded(problem.shards(rank, 3), group=group, dim=-2, overlap=overlap)
            assert not output.requires_grad
            assert not saved
            quiet.compare(rank, 3, (output,), {}, saying=f"{overlap}")
            problem.check(rank, group, overlap)

    run_ranks(3, main)


@pytest.mark.parametrize("activation", ["silu", F.softmax, lambda rows: torch.softmax(rows, -1)], ids=named)
def test_autocast(activation):
    activation = (lambda rows: torch.softmax(rows, -1)) if activation is F.softmax else activation
    op = mlp_operator(activation)
    problem = Problem(op, (6, 8), 0, dtype=torch.bfloat16)

    def main(rank, group):
        (plain,), _ = problem.run(rank, group)
        tensors = {name: t.detach().float().requires_grad_() for name, t in problem.shards(rank, 2).items()}
        with torch.autocast("cpu", torch.bfloat16):
            output = op.sharded(tensors, group=group, dim=0)
            output.backward(torch.ones_like(output))
        assert torch.equal(output, plain)
        assert all(tensor.grad.dtype == torch.float32 for tensor in tensors.values())

    run_ranks(2, main)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("activation", ["silu", torch.tanh])
def test_checkpointing(activation, reentrant):
    op = mlp_operator(activation)
    problem = Problem(op, (7, 5), 0)

    def main(rank, group):
        tensors = problem.shards(rank, 3)
        names = list(tensors)

        def module(*values):
            return op.sharded(dict(zip(names, values, strict=True)), group=group, dim=0)

        output = checkpoint(module, *tensors.values(), use_reentrant=reentrant)
        output.backward(shard(problem.seeds[0], 0, rank, 3))
        problem.compare(rank, 3, (output,), tensors)

    run_ranks(3, main)


def test_a_second_derivative_is_refused():
    problem = Problem(MLP, (4, 5), 0)

    def main(rank, group):
        tensors = problem.shards(rank, 2)
        output = MLP.sharded(tensors, group=group, dim=0)
        (grad,) = torch.autograd.grad(output.square().sum(), tensors["x"], create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives"):
            grad.square().sum().backward()

    run_ranks(2, main)


def test_the_hidden_rows_are_kept_once_and_the_gathered_rows_not_at_all():
    n, rows, features = 4, 32, 6
    problem = Problem(MLP, (rows, features), 0)

    def main(rank, group):
        sizes = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: sizes.setdefault(tensor.data_ptr(), tensor), lambda tensor: tensor
        ):
            tensors = problem.shards(rank, n)
            MLP.sharded(tensors, group=group, dim=0)
        given = {tensor.data_ptr() for tensor in tensors.values()}
        return sum(tensor.nbytes for pointer, tensor in sizes.items() if pointer not in given)

    hidden = [len(part) for part in torch.arange(HIDDEN).tensor_split(n)]
    assert run_ranks(n, main) == [2 * rows * part * 8 for part in hidden]  # gate and up, before the activation


# --- activations of the caller's own that fail ------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4])
def test_an_activation_that_raises_on_one_rank_is_loud_on_all_and_the_group_lives(n):
    problem = Problem(MLP, (2 * n, 5), 0)

    def main(rank, group):
        for last in range(1, n + 1):  # at the first piece, ..., at the last one, when others may be through
            calls = []

            def activation(rows, calls=calls, last=last):
                calls.append(1)
                if rank == 0 and len(calls) == last:
                    raise OverflowError("too large")
                return rows.tanh()

            op = mlp_operator(activation)
            with pytest.raises(OverflowError if rank == 0 else fo.PeerError, match="too large"):
                op.sharded(problem.shards(rank, n), group=group, dim=0, overlap=fo.Overlap(splits=1))
            problem.check(rank, group)

    run_ranks(n, main)


def test_an_activation_that_raises_in_backward_on_one_rank():
    problem = Problem(MLP, (4, 5), 0)

    def main(rank, group):
        def activation(rows):
            if rank == 1 and rows.requires_grad:  # only backward asks for a gradient
                raise OverflowError("too steep")
            return rows.tanh()

        t = problem.shards(rank, 2)
        output = fo.mlp(t["x"], t["up"], t["down"], activation=activation, group=group)
        with pytest.raises(OverflowError if rank == 1 else fo.PeerError, match="too steep"):
            output.sum().backward()
        problem.check(rank, group)

    run_ranks(2, main)


@pytest.mark.parametrize(
    ("activation", "error", "says"),
    [
        ("relu6", ValueError, "relu6"),
        (3, TypeError, "activation"),
        (None, TypeError, "activation"),
        (torch.nn.PReLU().double(), ValueError, "parameters"),
        (lambda rows: rows[:, :1], ValueError, "turned"),
        (lambda rows: rows.float(), ValueError, "turned"),
        (lambda rows: rows * torch.ones(1, dtype=rows.dtype, requires_grad=True), ValueError, "trainable"),
        (torch.nn.PReLU().double().forward, ValueError, "trainable"),
        (torch.relu_, ValueError, "in place"),
        (lambda rows: None, TypeError, "not a tensor"),
    ],
)
def test_activations_that_cannot_work_are_refused(activation, error, says):
    problem = Problem(MLP, (4, 5), 0)

    def main(rank, group):
        tensors = problem.shards(rank, 2)
        with pytest.raises(error, match=says):
            fo.mlp(tensors["x"], tensors["up"], tensors["down"], activation=activation, group=group, dim=0)
        problem.check(rank, group)

    run_ranks(2, main)


def test_a_frozen_module_is_an_activation():
    check_all(2, [Problem(mlp_operator(torch.nn.PReLU().double().requires_grad_(False)), (7, 5), 0)])
