"""Attention by kernels of the caller's, and with dropout: what a piece is given, and what comes again in backward."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import flashoverlap.torch as fo
from attention_cases import check, dense_rule, part, problem
from flashoverlap.torch.functional.attend import Heads, attention
from flashoverlap.torch.functional.attention import attention_by_queries
from flashoverlap.torch.functional.attention_kernels import Dropped
from flashoverlap.torch.functional.scores import Piece, Scores
from ranks import run_ranks
from unsharded import MODES

FEW = (MODES[0], MODES[2], MODES[5], MODES[8])


def sdpa(q, k, v, piece):
    return F.scaled_dot_product_attention(q, k, v, piece.rule(), scale=piece.scale, enable_gqa=True)


def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
    """With the meaning of that of FlashAttention: [B, S, H, D], its causal rule and window from the last key on."""
    queries, keys = q.shape[1], k.shape[1]
    at, t = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    rule = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        rule = t <= at
    if window_size[0] >= 0:
        rule = rule & (t >= at - window_size[0])
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=rule, enable_gqa=True)
    return out.transpose(1, 2)


def flash(q, k, v, piece):
    window = (-1, -1) if piece.window is None else (piece.window - 1, 0)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flash_attn_func(q, k, v, causal=piece.causal, window_size=window).transpose(1, 2)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("kernel", [sdpa, flash])
def test_all_gradients(n, kernel):
    for options in ({}, {"causal": True}, {"causal": True, "window": 4}):
        check(n, *problem(2, 11, 11, 12, 6)[:2], modes=FEW, kernel=kernel, **options)


def test_a_kernel_need_not_read_queries_or_keys():
    def average(q, k, v, piece):
        return v.cumsum(2)[:, :, list(piece.queries)] / torch.tensor([each + 1.0 for each in piece.queries])[:, None]

    tensors, seed, _ = problem(1, 7, 7, 4, 4)
    tensors["q"].zero_(), tensors["k"].zero_()
    check(2, tensors, seed, modes=FEW, kernel=average, causal=True)


def test_masks_and_scale_are_given_to_a_kernel():
    def mask(draw, batch, heads, seq, keys):
        return draw(batch, heads, seq, keys)

    tensors, seed, rule = problem(2, 7, 7, 4, 2, mask)
    check(2, tensors, seed, rule, scale=0.3, modes=FEW, kernel=sdpa)
    check(2, tensors, seed, rule > 0, scale=0.3, modes=FEW, kernel=sdpa, causal=True)


def test_positions_are_global():
    """Linear biases by distance, a slope a head, against the same as a mask."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    distance = torch.arange(10)[None] - torch.arange(10)[:, None]
    rule = dense_rule(10, 10, slopes[:, None, None] * distance, causal=True)[None]
    tensors, seed, _ = problem(2, 10, 10, 4, 4)

    def main(rank, group):
        def biased(q, k, v, piece):
            s = torch.arange(piece.queries.start, piece.queries.stop)[:, None]
            t = torch.arange(piece.keys.start, piece.keys.stop)
            bias = slopes.chunk(2)[rank][:, None, None] * (t - s)
            return F.scaled_dot_product_attention(q, k, v, bias.masked_fill(t > s, -torch.inf)[None])

        found = []
        for options in ({"causal": True, "kernel": biased}, {"mask": rule.chunk(2, 1)[rank]}):
            t = [part(2, name, tensor, rank).clone().requires_grad_() for name, tensor in tensors.items()]
            z = fo.attention_reduce_scatter(*t, group=group, **options)
            z.backward(seed.tensor_split(2, 1)[rank])
            found.append([z, *(each.grad for each in t)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)

    run_ranks(2, main)


def test_flex_attention():
    """Whose functions of positions only need the two offsets; on a CPU it has no backward, and that is told."""

    def of_positions(s, t):
        return (t <= s) & (t > s - 4)

    def flex(q, k, v, piece):
        s, t = piece.queries.start, piece.keys.start
        mask = create_block_mask(
            lambda b, h, i, j: of_positions(i + s, j + t), 1, None, q.shape[2], k.shape[2], device="cpu"
        )

        def biased(score, b, h, i, j):
            return score + (i + s - j - t) / 8

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is slow without torch.compile
            return flex_attention(q, k, v, score_mod=biased, block_mask=mask, enable_gqa=True)

    tensors, _, _ = problem(2, 11, 11, 4, 2, dtype=torch.float32)
    s, t = torch.arange(11)[:, None], torch.arange(11)
    rule = ((s - t) / 8).masked_fill(~of_positions(s, t), -torch.inf)[None, None]

    def main(rank, group):
        here = [part(2, name, tensor, rank).clone() for name, tensor in tensors.items()]
        options = {"causal": True, "window": 4, "group": group}
        want = fo.attention_reduce_scatter(*here, mask=rule, group=group)
        for overlap in FEW[:2]:
            z = fo.attention_reduce_scatter(*here, kernel=flex, overlap=overlap, **options)
            torch.testing.assert_close(z, want)
        here[0].requires_grad_()
        with pytest.raises((NotImplementedError, fo.PeerError), match="backward"):
            fo.attention_reduce_scatter(*here, kernel=flex, **options)

    run_ranks(2, main)


def test_a_piece_at_a_time_is_computed_and_computed_again():
    tensors, seed, _ = problem(1, 16, 16, 2, 2)

    def main(rank, group):
        sizes = []

        def noting(q, k, v, piece):
            sizes.append((len(piece.queries), len(piece.keys), torch.is_grad_enabled()))
            return sdpa(q, k, v, piece)

        t = [part(2, name, tensor, rank).clone().requires_grad_() for name, tensor in tensors.items()]
        options = {"causal": True, "window": 3, "kernel": noting, "overlap": fo.Overlap("flash", splits=4)}
        z = fo.attention_reduce_scatter(*t, group=group, **options)
        z.backward(seed.tensor_split(2, 1)[rank])
        pieces = sizes[2:]  # after the trial
        assert all(queries <= 8 and keys <= queries + 2 for queries, keys, _ in pieces)
        assert [sum(queries for queries, _, again in pieces if again is phase) for phase in (False, True)] == [16, 16]

    run_ranks(2, main)


# --- dropout ----------------------------------------------------------------------------------------------------------


def piece_of(queries, keys, sequence=0):
    return Piece(sequence, queries, keys, None, False, None, None)


def test_what_is_dropped_depends_on_positions_alone():
    dropped = Dropped(0.25, 11)
    whole = dropped.kept(3, piece_of(range(300), range(290)), "cpu")
    assert whole.double().mean() == pytest.approx(0.75, abs=0.01)
    for queries, keys in ((range(5, 7), range(290)), (range(120, 300), range(100, 270)), (range(299, 300), range(1))):
        inner = dropped.kept(3, piece_of(queries, keys), "cpu")
        assert torch.equal(inner, whole[:, :, queries.start : queries.stop, keys.start : keys.stop])
    others = (
        dropped.kept(3, piece_of(range(300), range(290), sequence=1), "cpu"),
        Dropped(0.25, 12).kept(3, piece_of(range(300), range(290)), "cpu"),
        Dropped(0.25, 11 + 2**40).kept(3, piece_of(range(300), range(290)), "cpu"),
        whole.roll(1, 1),
        whole.roll(128, 2),
        whole.roll(128, 3),
    )
    for other in others:
        assert (whole == other).double().mean() == pytest.approx(0.75**2 + 0.25**2, abs=0.02)


def dropped_reference(t, rule, kept, probability):
    groups = t["q"].shape[1] // t["k"].shape[1]
    k, v = (t[name].repeat_interleave(groups, 1) for name in ("k", "v"))
    scores = t["q"] @ k.transpose(2, 3) / t["q"].shape[-1] ** 0.5
    weights = scores.masked_fill(~rule, -torch.inf).softmax(-1) * kept / (1 - probability)
    return F.linear((weights @ v).transpose(1, 2).flatten(2), t["w"], t["b"])


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 4}])
def test_dropout_with_all_gradients(n, options):
    batch, seq, heads, probability = 2, 11, 6, 0.4
    tensors, seed, _ = problem(batch, seq, seq, heads, heads)
    rule = dense_rule(seq, seq, **options)
    dropped = [Dropped(probability, 70 + rank) for rank in range(n)]
    pieces = [piece_of(range(seq), range(seq), sequence) for sequence in range(batch)]
    kept = torch.cat([torch.cat([each.kept(heads // n, piece, "cpu") for each in dropped], 1) for piece in pieces])
    whole = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    want = dropped_reference(whole, rule, kept, probability)
    want.backward(seed)

    def main(rank, group):
        scores = Scores(dropout=probability, seed=70 + rank, **options)
        for overlap in FEW:
            t = {name: part(n, name, tensor, rank).clone().requires_grad_() for name, tensor in tensors.items()}
            heads = Heads(t["q"], t["k"], t["v"], scores)
            z = attention_by_queries(heads, t["w"], t["b"], group=group, overlap=overlap)
            torch.testing.assert_close(z, want.tensor_split(n, 1)[rank], atol=1e-10, rtol=1e-10)
            z.backward(seed.tensor_split(n, 1)[rank])
            for name, tensor in t.items():
                torch.testing.assert_close(tensor.grad, part(n, name, whole[name].grad, rank), atol=1e-10, rtol=1e-10)
            uncut = attention(heads).transpose(1, 2).flatten(2) @ t["w"].t()
            assert uncut.shape == (batch, seq, 7)
        return uncut.detach()

    torch.testing.assert_close(sum(run_ranks(n, main)) + tensors["b"], want.detach(), atol=1e-10, rtol=1e-10)


def test_dropout_in_half_precision_and_with_masks():
    tensors, _, mask = problem(1, 9, 9, 2, 1, lambda draw, *sizes: draw(*sizes) > 0, dtype=torch.bfloat16)
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    for rule in (mask, torch.zeros(9, 9).masked_fill(~mask[0, 0], -torch.inf)):
        scores = Scores(rule, dropout=0.5, seed=3)
        half, double = attention(Heads(q, k, v, scores)), attention(Heads(q.double(), k.double(), v.double(), scores))
        torch.testing.assert_close(half.double(), double, atol=0.05, rtol=0.05)


def test_seeds():
    """The ordinary stream gives them: reproducible, another each call, and another on each rank even if seeded alike."""
    scores = Scores(dropout=0.5)
    torch.manual_seed(5)
    first, second = scores.drawn(0).seed, scores.drawn(0).seed
    torch.manual_seed(5)
    assert scores.drawn(1).seed != first
    torch.manual_seed(5)
    assert scores.drawn(0).seed == first != second
    assert scores.drawn(0).drawn(1).seed != first  # as drawn, and drawn once
    state = torch.get_rng_state()
    assert Scores().drawn(0).seed is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_in_a_checkpoint(use_reentrant):
    tensors, seed, _ = problem(2, 11, 11, 2, 2)

    def main(rank, group):
        def layer(*t):
            return fo.attention_reduce_scatter(*t, causal=True, dropout=0.5, group=group)

        found = []
        for run in (layer, lambda *t: checkpoint(layer, *t, use_reentrant=use_reentrant)):
            torch.manual_seed(2)
            t = [tensor.clone().requires_grad_() for tensor in tensors.values()]
            z = run(*t)
            z.backward(seed)
            found.append([z, *(each.grad for each in t)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, atol=0, rtol=0)
        torch.manual_seed(3)
        assert not torch.allclose(layer(*t), found[0][0])

    run_ranks(1, main)
