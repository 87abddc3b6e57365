"""The exchanges around an attention of own heads: the right values on the right rank, there and back, and gradients."""

import pytest
import torch

import flashoverlap.torch as fo
from flashoverlap.torch.functional.head_exchange import heads_to_rows, rows_to_heads
from flashoverlap.torch.functional.shares import tensor_split
from flashoverlap.torch.modules.heads import spread
from ranks import outcomes, run_ranks

MODES = (fo.Overlap(), fo.Overlap("off"), fo.Overlap("collective"), fo.Overlap("flash", splits=3))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_rows_become_heads_and_rows_again(world_size):
    """Rows that nothing divides, of two sequences; every value says which sequence, row and feature it is of."""
    sequence, row, feature = torch.meshgrid(torch.arange(2.0), torch.arange(7.0), torch.arange(11.0), indexing="ij")
    full = (100 * sequence + 10 * row + feature / 100).double()
    shares = tensor_split(11, world_size)

    def main(rank, group):
        for overlap in MODES:
            x = full.tensor_split(world_size, 1)[rank].clone().requires_grad_()
            heads = rows_to_heads(x, shares, group=group, overlap=overlap)
            assert torch.equal(heads, full[..., shares[rank].start : shares[rank].stop])
            rows = heads_to_rows(heads, shares, group=group, overlap=overlap)
            assert torch.equal(rows, x)
            rows.backward(x.detach() * 3)
            assert torch.equal(x.grad, x.detach() * 3)

    run_ranks(world_size, main)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_features_that_ranks_share_are_summed(dtype):
    shares = (range(4), range(2, 4), range(4, 4))  # some once, some twice, one never
    seeds = [torch.full((5, len(share)), float(rank + 1), dtype=dtype) for rank, share in enumerate(shares)]

    def main(rank, group):
        x = torch.randn(5, 5, dtype=dtype).tensor_split(3)[rank].clone().requires_grad_()
        rows_to_heads(x, shares, group=group).backward(seeds[rank])
        want = torch.tensor([1.0, 1.0, 3.0, 3.0, 0.0], dtype=dtype).expand(len(x), 5)
        assert torch.equal(x.grad, want)

    run_ranks(3, main)


def test_what_does_not_fit_is_refused_on_every_rank():
    def main(rank, group):
        heads_to_rows(torch.ones(4, 3 if rank else 2), (range(2), range(2, 4)), group=group)

    _, errors = outcomes(2, main)
    assert "has not the features of this rank, range(2, 4)" in str(errors[1])
    assert errors[0] is not None


@pytest.mark.parametrize(
    ("query", "key_value", "ranks", "sizes"),
    [
        (8, 2, 4, [(2, 1)] * 4),
        (28, 7, 2, [(16, 4), (12, 3)]),
        (6, 6, 4, [(2, 2), (2, 2), (1, 1), (1, 1)]),
        (6, 2, 4, [(2, 1), (1, 1), (2, 1), (1, 1)]),
        (4, 1, 3, [(2, 1), (1, 1), (1, 1)]),
    ],
)
def test_heads_are_spread_with_their_groups(query, key_value, ranks, sizes):
    shares = spread(query, key_value, ranks)
    assert [tuple(map(len, share)) for share in shares] == sizes
    assert [head for queries, _ in shares for head in queries] == list(range(query))
    for queries, key_values in shares:
        assert {head // (query // key_value) for head in queries} == set(key_values)
        assert len(queries) % len(key_values) == 0
