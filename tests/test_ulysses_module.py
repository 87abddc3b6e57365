"""UlyssesAttention beside one process's attention: any heads, any length, rotary positions, masks, dropout."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import flashoverlap.torch as fo
from ranks import outcomes, run_ranks

HIDDEN, FEATURES = 12, 4


def linears(heads, kv_heads, bias=True, dtype=torch.float64):
    torch.manual_seed(1)
    sizes = [(HIDDEN, heads), (HIDDEN, kv_heads), (HIDDEN, kv_heads)]
    made = [nn.Linear(inner, count * FEATURES, bias=bias, dtype=dtype) for inner, count in sizes]
    return [*made, nn.Linear(heads * FEATURES, HIDDEN, bias=bias, dtype=dtype)]


def rotation(positions):
    """cos and sin, first half of the features against the second."""
    steps = positions[..., None].double() * 0.3 ** torch.arange(FEATURES // 2)
    both = torch.cat([steps, steps], -1)
    return both.cos(), both.sin()


def turned(x, cos, sin):
    half = FEATURES // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def attention(modules, x, heads, kv_heads, *, mask=None, causal=False, cos_sin=None):
    q, k, v = (
        linear(x).unflatten(-1, (count, FEATURES)).transpose(1, 2)
        for linear, count in zip(modules[:3], (heads, kv_heads, kv_heads), strict=True)
    )
    if cos_sin is not None:
        q, k = (turned(each, *(part.unsqueeze(-3) for part in cos_sin)) for each in (q, k))
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
    return modules[3](out.transpose(1, 2).flatten(2))


def draw(*size, seed=3):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found, want, tolerance=1e-10):
    torch.testing.assert_close(found.double(), want.double(), atol=tolerance, rtol=tolerance)


def check(n, heads, kv_heads, batch, length, *, mask=None, causal=False, forward=lambda rank: {}, cos_sin=None, **more):
    dtype, tolerance = more.pop("dtype", torch.float64), more.pop("tolerance", 1e-10)
    modules, x = linears(heads, kv_heads), draw(batch, length, HIDDEN).to(dtype).double().requires_grad_()
    want = attention(modules, x, heads, kv_heads, mask=mask, causal=causal, cos_sin=cos_sin)
    seed = draw(*want.shape, seed=5)
    want.backward(seed)

    def main(rank, group):
        mine = [copy.deepcopy(linear).to(dtype) for linear in modules]
        for linear in mine:
            linear.zero_grad()
        module = fo.UlyssesAttention(*mine, num_heads=heads, num_kv_heads=kv_heads, group=group, causal=causal, **more)
        own = x.detach().tensor_split(n, 1)[rank].to(dtype).requires_grad_()
        z = module(own, mask=mask, **forward(rank))
        close(z, want.tensor_split(n, 1)[rank], tolerance)
        z.backward(seed.tensor_split(n, 1)[rank].to(dtype))
        close(own.grad, x.grad.tensor_split(n, 1)[rank], tolerance)
        return [parameter.grad for linear in mine for parameter in linear.parameters()]

    grads = run_ranks(n, main)
    wanted = [parameter.grad for linear in modules for parameter in linear.parameters()]
    for of_rank in grads:
        for index, (grad, total) in enumerate(zip(of_rank, wanted, strict=True)):
            if more.get("sum_gradients", True):
                close(grad, total, tolerance)
                assert torch.equal(grad, grads[0][index]), "the same bits on every rank"
    if not more.get("sum_gradients", True):
        for index, total in enumerate(wanted):
            close(sum(of_rank[index] for of_rank in grads), total, tolerance)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_any_heads_and_any_length(n, causal):
    """C16: heads that the ranks do not divide, fewer key/value heads than ranks, ranks without heads."""
    for heads, kv_heads, batch, length in ((8, 8, 2, 16), (8, 2, 1, 11), (6, 6, 2, 9), (28, 7, 1, 5), (3, 1, 2, 3)):
        check(n, heads, kv_heads, batch, length, causal=causal)


@pytest.mark.parametrize("length", [16, 10])
def test_rotary_at_global_positions(length):
    """C45: by default, by position ids of the own rows, and by cos and sin of them."""
    n, here = 4, torch.arange(length)
    ids = torch.stack([here * 3 + 100, here.flip(0)])
    check(n, 8, 2, 2, length, causal=True, cos_sin=rotation(here), forward=lambda rank: {"rotary": rotation})
    for positions in (here + 100, ids):
        own = [each.contiguous() for each in positions.tensor_split(n, -1)]
        for given in (
            [{"rotary": rotation, "position_ids": ids_of_rank} for ids_of_rank in own],
            [{"rotary": rotation(ids_of_rank)} for ids_of_rank in own],
        ):
            cos_sin = rotation(positions)
            check(n, 8, 2, 2, length, causal=True, cos_sin=cos_sin, forward=given.__getitem__)


def test_masks_are_cut_by_heads():
    length = 7
    additive = draw(2, 6, length, length)
    padding = torch.ones(2, 1, 1, length, dtype=torch.bool)
    padding[0, ..., -2:] = False
    for mask in (additive, additive[:1], additive[0], padding, padding.expand(2, 6, length, length), additive[0, 0]):
        check(4, 6, 6, 2, length, mask=mask)


def test_gradients_left_to_data_parallelism():
    check(3, 6, 3, 2, 7, sum_gradients=False, overlap=fo.Overlap("flash", splits=2))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_other_dtypes(dtype, tolerance):
    check(2, 4, 2, 2, 9, causal=True, dtype=dtype, tolerance=tolerance)


def averaging(group, dropout):
    """Every query averages ones over 4 keys, in two heads side by side: what comes out says how many were kept."""
    modules = linears(2, 2)
    with torch.no_grad():
        for linear in modules:
            linear.weight.zero_()
            linear.bias.zero_()
        modules[2].bias.fill_(1.0)
        modules[3].weight.copy_(torch.eye(12, 8))
    return fo.UlyssesAttention(*modules, num_heads=2, group=group, dropout=dropout)


def test_dropout_repeats_on_recompute():
    def main(rank, group):
        module = averaging(group, 0.5)
        x = draw(1, 4, HIDDEN).requires_grad_()
        found = []
        for run in (module, lambda x: checkpoint(module, x, use_reentrant=False)):
            module.zero_grad()
            torch.manual_seed(7)
            z = run(x)
            torch.rand(3)
            z.square().sum().backward()
            found.append((z.detach(), module.out.weight.grad.clone()))
        assert all(map(torch.equal, *found))
        assert not torch.equal(found[0][0][..., :8], torch.ones(1, 4, 8))
        module.eval()
        close(module(x)[..., :8], torch.ones(1, 4, 8))

    run_ranks(1, main)  # the ranks of more would share one random stream, being threads


def test_dropout_differs_between_heads():
    def main(rank, group):
        return averaging(group, 0.5)(draw(1, 40, HIDDEN).tensor_split(2, 1)[rank]).detach()

    rows = torch.cat(run_ranks(2, main), 1)
    assert not torch.equal(rows[..., :4], rows[..., 4:8])
    assert (rows[..., :8] - 1).abs().max() > 0


def test_copies_state_and_frozen_weights():
    modules = linears(4, 2, bias=False)

    def main(rank, group):
        module = fo.UlyssesAttention(*copy.deepcopy(modules), num_heads=4, num_kv_heads=2, group=group)
        assert sorted(module.state_dict()) == ["k.weight", "out.weight", "q.weight", "v.weight"]
        twin = copy.deepcopy(module)
        module.q.weight.requires_grad_(False)
        x = draw(1, 5, HIDDEN).tensor_split(2, 1)[rank]
        module(x).sum().backward()
        twin(x).sum().backward()
        assert module.q.weight.grad is None
        close(module.k.weight.grad, twin.k.weight.grad)
        assert twin.q.weight is not module.q.weight
        with pytest.raises(TypeError, match="state_dict"):
            pickle.dumps(module)

    run_ranks(2, main)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "told"),
    [
        (4, 3, "4 query heads cannot share 3"),
        (5, 5, "5 heads cannot share the 16 output features of q"),
        (8, 4, "heads of q have 2 features, and those of k 4"),
        (0, 1, "0 query heads"),
    ],
)
def test_heads_that_do_not_fit(heads, kv_heads, told):
    with pytest.raises(ValueError, match=told):
        fo.UlyssesAttention(*linears(4, 4), num_heads=heads, num_kv_heads=kv_heads, group=None)


def test_what_is_no_plain_linear_is_refused():
    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    q, _, v, out = linears(4, 4)
    with pytest.raises(TypeError, match="Adapted"):
        fo.UlyssesAttention(q, Adapted(4, 4), v, out, num_heads=4, group=None)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"x_shard": torch.ones(3, HIDDEN)}, r"must be \[B, S_r, C\]"),
        ({"x_shard": torch.ones(1, 3, HIDDEN + 1)}, "input features"),
        ({"x_shard": torch.ones(1, 1, HIDDEN)}, "tensor_split gives"),
        ({"mask": torch.ones(2, 6, 6)}, "all 4 heads"),
        ({"mask": torch.ones(4, 6, 6)}, "disagree"),
        ({"position_ids": torch.arange(3)}, "go with a function rotary"),
        ({"mask": [[True]]}, "mask must be a tensor or None, not list"),
        ({"position_ids": [0, 1, 2], "rotary": rotation}, "position_ids must be a tensor or None, not list"),
        ({"position_ids": torch.arange(2), "rotary": rotation}, "of 3 own rows"),
        ({"rotary": rotation(torch.arange(6))}, "of 3 rows"),
        ({"rotary": rotation(torch.arange(3))}, "rotary=cos and sin"),
        ({"rotary": rotation}, "rotary=a function"),
        ({"rotary": torch.ones(3, 4)}, r"cos and sin, not \(Tensor\)"),
        ({"rotary": (torch.ones(3, 3),) * 2}, "halves"),
        ({"rotary": (torch.ones(3, 6),) * 2}, "with 4 features"),
        ({"rotary": (torch.ones(3, 4, requires_grad=True),) * 2}, "trainable"),
    ],
)
def test_refused_on_every_rank(arguments, told):
    refused({}, arguments, told)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda positions: positions.no_such_thing, "no_such_thing"),
        (lambda positions: rotation(positions[1:]), "of 6 rows"),
        (lambda positions: rotation(positions.expand(3, -1)), "of 6 rows of 1 sequences"),
        (lambda positions: None, "NoneType"),
        (lambda positions: [each.requires_grad_() for each in rotation(positions)], "trainable"),
    ],
)
def test_a_rotary_function_that_fails_on_one_rank(function, told):
    refused({"rotary": rotation}, {"rotary": function}, told)


def test_a_mask_of_another_size_on_one_rank():
    refused({"mask": torch.ones(4, 6, 6)}, {"mask": torch.ones(4, 6, 5)}, "cannot be broadcast")


def refused(first, second, told):
    """By both of two ranks, which are given these arguments."""

    def main(rank, group):
        module = fo.UlyssesAttention(*linears(4, 4, dtype=torch.float32), num_heads=4, group=group)
        module(**({"x_shard": torch.ones(1, 3, HIDDEN)} | (second if rank else first)))

    _, errors = outcomes(2, main)
    for error in errors:
        assert isinstance(error, ValueError | TypeError | AttributeError | fo.PeerError)
        with pytest.raises(type(error), match=told):
            raise error
