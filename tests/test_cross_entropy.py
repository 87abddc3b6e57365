import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flashoverlap.torch as fo
from ranks import named, run_ranks

VOCABULARY = 11
REDUCTIONS = ("mean", "sum", "none")
loss_of = fo.vocab_parallel_cross_entropy


def problem(rows=(9,), dtype=torch.float64, vocabulary=VOCABULARY, scale=3.0):
    random = torch.Generator().manual_seed(5)
    logits = (torch.randn(*rows, vocabulary, generator=random, dtype=torch.float64) * scale).to(dtype)
    labels = torch.randint(vocabulary, rows, generator=random)
    if labels.dim() and labels.numel() > 2:
        labels.view(-1)[1] = -100
    return logits, labels


def unsharded(logits, labels, ignore_index=-100, reduction="mean"):
    """The loss and the gradient of torch, in float64."""
    leaf = logits.double().clone().requires_grad_()
    loss = F.cross_entropy(
        leaf.reshape(-1, leaf.shape[-1]), labels.reshape(-1), ignore_index=ignore_index, reduction=reduction
    )
    loss = loss.view(labels.shape) if reduction == "none" else loss
    (loss * weights(loss)).sum().backward()
    return loss.detach(), leaf.grad


def weights(loss):
    """A gradient of the loss that is not all ones."""
    return torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)


def sizes_of(n, vocabulary=VOCABULARY):
    return [len(part) for part in torch.arange(vocabulary).tensor_split(n)]


def run(n, logits, labels, sizes=None, lay=lambda tensor: tensor, **more):
    """Loss by rank, and the gradient of all logits put together."""
    sizes = sizes or sizes_of(n, logits.shape[-1])

    def main(rank, group):
        shard = lay(logits.split(sizes, -1)[rank].clone()).detach().requires_grad_()
        loss = loss_of(shard, labels, group=group, first=sum(sizes[:rank]), **more)
        (loss * weights(loss)).sum().backward()
        assert shard.grad.dtype == logits.dtype
        return loss.detach(), shard.grad

    losses, gradients = zip(*run_ranks(n, main), strict=True)
    return losses, torch.cat(gradients, -1)


def check(n, logits, labels, tolerance=1e-12, gradient_tolerance=None, **more):
    losses, gradient = run(n, logits, labels, **more)
    asked = {name: more[name] for name in ("ignore_index", "reduction") if name in more}
    want, want_gradient = unsharded(logits, labels, **asked)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    torch.testing.assert_close(losses[0].double(), want, atol=tolerance, rtol=tolerance)
    tolerance = gradient_tolerance or tolerance
    torch.testing.assert_close(gradient.double(), want_gradient, atol=tolerance, rtol=tolerance)


# --- values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_float64(reduction, n):
    for rows in ((9,), (2, 3), (), (1,)):
        check(n, *problem(rows), reduction=reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_float32(reduction):
    check(3, *problem((4, 5), torch.float32), 1e-5, reduction=reduction)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_computed_in_float32_and_only_the_gradient_is_rounded(dtype):
    logits, labels = problem((40,), dtype, vocabulary=100)
    check(4, logits, labels, 1e-5, torch.finfo(dtype).eps, reduction="sum")
    assert run(2, logits, labels)[0][0].dtype == torch.float32


@pytest.mark.parametrize("sizes", [[5, 0, 6], [0, 0, 11], [11, 0, 0], [1, 9, 1]], ids=str)
def test_uneven_and_empty_shards(sizes):
    check(3, *problem(), sizes=sizes)


def test_more_rows_than_one_block():
    check(2, *problem((2500,)))


def test_strided_logits_and_labels():
    check(2, *problem((4, 6)), lay=lambda tensor: torch.stack([tensor, tensor], -1)[..., 0])
    check(2, *problem((4, 6)), lay=lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1))
    logits, labels = problem((4, 6))
    check(2, logits, labels.mT.contiguous().mT)


def test_large_and_masked_logits():
    logits, labels = problem((30,), scale=500.0)
    check(3, logits, labels)
    masked = logits.masked_fill(torch.arange(VOCABULARY) < 4, -torch.inf)  # all that the first rank holds
    check(3, masked, labels.clamp(min=4))


@pytest.mark.parametrize("ignore_index", [3, -1, 50])
def test_ignore_index(ignore_index):
    logits, labels = problem()
    check(2, logits, labels.where(labels >= 0, ignore_index), ignore_index=ignore_index)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_valid_label_gives_zeros(reduction):
    logits, labels = problem()
    for rows in (9, 0):
        losses, gradient = run(2, logits[:rows], torch.full_like(labels, -100)[:rows], reduction=reduction)
        assert all(bool((loss == 0).all()) for loss in losses)
        assert bool((gradient == 0).all())


def test_an_expanded_gradient():
    logits, labels = problem()

    def main(rank, group):
        shard = logits.tensor_split(2, -1)[rank].clone().requires_grad_()
        loss = loss_of(shard, labels, group=group, first=(0, 6)[rank], reduction="none")
        loss.sum().backward()
        return shard.grad

    leaf = logits.clone().requires_grad_()
    F.cross_entropy(leaf, labels, reduction="sum").backward()
    torch.testing.assert_close(torch.cat(run_ranks(2, main), -1), leaf.grad)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_gradients_and_then_with(without):
    logits, labels = problem()
    want, _ = unsharded(logits, labels)

    def main(rank, group):
        for wanted in (False, True):
            shard = logits.tensor_split(2, -1)[rank].clone().requires_grad_()
            with torch.enable_grad() if wanted else without():
                loss = loss_of(shard, labels, group=group, first=(0, 6)[rank])
            assert loss.requires_grad == wanted
            torch.testing.assert_close(loss.detach(), want)

    run_ranks(2, main)


def test_the_logits_are_not_kept_twice_and_three_numbers_a_row_are_sent():
    rows = 40
    logits, labels = problem((rows,), torch.bfloat16, vocabulary=64)
    fo.report().clear()

    def main(rank, group):
        shard, kept = logits.tensor_split(2, -1)[rank].clone().requires_grad_(), {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.setdefault(tensor.data_ptr(), tensor), lambda tensor: tensor
        ):
            loss_of(shard, labels, group=group, first=32 * rank, reduction="sum")
        return sum(tensor.nbytes for tensor in kept.values()) - shard.nbytes - labels.nbytes

    assert run_ranks(2, main) == [2 * rows * 4] * 2  # the maximum and the sum of each row
    assert sum(record.bytes for record in fo.report()) == 2 * 3 * rows * 4


def test_a_second_derivative_is_refused():
    logits, labels = problem()

    def main(rank, group):
        shard = logits.tensor_split(2, -1)[rank].clone().requires_grad_()
        loss = loss_of(shard, labels, group=group, first=(0, 6)[rank])
        (grad,) = torch.autograd.grad(loss, shard, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives"):
            grad.square().sum().backward()

    run_ranks(2, main)


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(error, says, arguments, n=2):
    """``arguments(rank)`` changes the arguments of a call that would work; the group lives on."""

    def main(rank, group):
        logits, labels = problem()
        good = {"logits_shard": logits.tensor_split(n, -1)[rank], "labels": labels}
        good |= {"group": group, "first": sum(sizes_of(n)[:rank])}
        with pytest.raises(error, match=says):
            loss_of(**good | arguments(rank))
        torch.testing.assert_close(loss_of(**good), unsharded(logits, labels)[0])

    run_ranks(n, main)


LABELS = problem()[1]


@pytest.mark.parametrize("label", [-1, 11, -101, 1 << 40])
def test_a_label_outside_of_the_vocabulary(label):
    refused(ValueError, rf"label {label} .* 0 \.\. 10", lambda rank: {"labels": LABELS.where(LABELS != -100, label)})


@pytest.mark.parametrize(
    ("says", "arguments"),
    [
        ("different labels", lambda rank: {"labels": LABELS.clone().fill_(rank)}),
        ("7 from 0, 5 from 6", lambda rank: {"logits_shard": torch.zeros(9, (7, 5)[rank], dtype=torch.float64)}),
        ("6 from 6, 5 from 0", lambda rank: {"first": (6, 0)[rank]}),
        ("(?s)disagree.*float64.*float32", lambda rank: {"logits_shard": torch.zeros(9, 6)} if rank else {}),
        ("(?s)disagree.*mean.*sum", lambda rank: {"reduction": REDUCTIONS[rank]}),
        ("(?s)disagree.*100.*7", lambda rank: {"ignore_index": (-100, 7)[rank]}),
    ],
    ids=named,
)
def test_ranks_that_disagree(says, arguments):
    refused(ValueError, says, arguments)


@pytest.mark.parametrize(
    ("error", "says", "changed"),
    [
        (TypeError, "int32", {"labels": LABELS.int()}),
        (TypeError, "list", {"labels": [1, 2]}),
        (ValueError, "one entry for each row", {"labels": LABELS[:4]}),
        (TypeError, "logits is torch.int64", {"logits_shard": LABELS}),
        (TypeError, "first", {"first": None}),
        (ValueError, "first=-1", {"first": -1}),
        (ValueError, "average", {"reduction": "average"}),
        (TypeError, "ignore_index", {"ignore_index": None}),
        (ValueError, "group=None", {"group": None}),
    ],
    ids=named,
)
def test_arguments_that_cannot_work(error, says, changed):
    refused(error, says, lambda rank: changed)


# --- DTensor: torch's own rule of which rank holds what ---------------------------------------------------------------


def _dtensors(rank, path, n):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=n)
    mesh = init_device_mesh("cpu", (n,))
    for vocabulary in (11, 3, 2, 9):  # of three ranks, the last has fewer or none
        logits, labels = problem((2, 4), vocabulary=vocabulary)
        for dim in (-1, 2):
            sharded = distribute_tensor(logits, mesh, [Shard(dim)]).requires_grad_()
            loss = loss_of(sharded, labels)
            loss.backward()
            want, gradient = unsharded(logits, labels)
            torch.testing.assert_close(loss.detach(), want)
            torch.testing.assert_close(sharded.grad.full_tensor() * weights(loss), gradient)
    for bad, more, says in (
        (distribute_tensor(logits, mesh, [Replicate()]), {}, "Replicate"),
        (sharded, {"first": 0}, "neither"),
        (sharded, {"group": mesh}, "neither"),
    ):
        with pytest.raises(ValueError, match=says):
            loss_of(bad, labels, **more)
    dist.destroy_process_group()


def test_dtensors(tmp_path):
    mp.spawn(_dtensors, args=(str(tmp_path), 3), nprocs=3)
