"""attention_reduce_scatter beside one process: values and all gradients, by global positions."""

import pytest
import torch
import torch.nn.functional as F

import flashoverlap.torch as fo
from attention_cases import FEATURES, check, dense_rule, problem
from flashoverlap.live_bytes import LiveBytes
from ranks import run_ranks
from unsharded import MODES

FEW = (MODES[0], MODES[2], MODES[5], MODES[8])


def additive(draw, batch, heads, seq, keys):
    return draw(batch, heads, seq, keys)


def left_out(draw, batch, heads, seq, keys):
    """Added, with keys left out as -inf, and a query that reads nothing."""
    mask = draw(batch, 1, seq, keys)
    mask[..., 2::3] = -torch.inf
    mask[-1, :, seq // 2] = -torch.inf
    return mask


def padding(draw, batch, heads, seq, keys):
    mask = torch.ones(batch, 1, 1, keys, dtype=torch.bool)
    mask[0, :, :, -2:] = False
    return mask


def padding_before(draw, batch, heads, seq, keys):
    """With the causal rule, the first queries read nothing."""
    mask = torch.ones(batch, 1, 1, keys, dtype=torch.bool)
    mask[0, ..., :3] = False
    return mask


def documents(draw, batch, heads, seq, keys):
    """Sequences packed side by side, each of which reads itself."""
    document = torch.arange(seq) * 3 // seq
    return document[:, None] == document


def window_of_a_model(draw, batch, heads, seq, keys):
    s, t = torch.arange(seq)[:, None], torch.arange(keys)
    return ((t <= s) & (t > s - 3))[None, None].expand(batch, 1, seq, keys)


def by_head(draw, batch, heads, seq, keys):
    return draw(batch, heads, seq, keys) > 0.3


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_causal(n):
    for batch, seq, kv_heads in ((1, 16, 12), (2, 11, 12), (3, 2, 12), (2, 10, 1 if n == 1 else n), (1, 1, 12)):
        check(n, *problem(batch, seq, seq, 12, kv_heads)[:2], causal=True, modes=MODES if n < 3 else MODES[::2])


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 4}])
def test_ranks_without_heads(options):
    check(3, *problem(2, 7, 7, 2, 2)[:2], modes=MODES[::2], **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 4}])
def test_eight_ranks(options):
    check(8, *problem(2, 21, 21, 8, 8)[:2], modes=FEW[:2], **options)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("mask", [None, additive, left_out, padding, by_head])
def test_masks(n, mask):
    tensors, seed, rule = problem(2, 9, 13, 6, 6, mask)
    check(n, tensors, seed, rule, scale=0.3, modes=MODES[:4])


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("mask", [padding_before, left_out, documents, window_of_a_model, by_head])
def test_masks_of_as_many_queries_as_keys(n, mask):
    tensors, seed, rule = problem(2, 11, 11, 12, 6, mask)
    for options in ({}, {"causal": True}, {"causal": True, "window": 4}):
        check(n, tensors, seed, rule, modes=FEW, **options)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 2, 5, 9, 100])
def test_window(n, window):
    check(n, *problem(2, 9, 9, 4, 4)[:2], causal=True, window=window, modes=FEW)


def test_longer_than_a_strip():
    for seq, mask, options in ((1601, None, {}), (601, None, {"window": 150}), (601, window_of_a_model, {})):
        tensors, seed, rule = problem(1, seq, seq, 2, 1, mask)
        check(1, tensors, seed, rule, causal=True, modes=FEW[:1], **options)


def test_values_of_another_size():
    """Which torch has no flash kernel for."""
    tensors, seed, rule = problem(2, 7, 7, 4, 2, documents, features_of_values=3)
    for options in ({}, {"causal": True}, {"causal": True, "window": 3}):
        check(2, tensors, seed, None, modes=FEW[:2], **options)
        check(2, tensors, seed, rule, modes=FEW[:2], **options)
    tensors, seed, rule = problem(2, 7, 7, 4, 2, padding_before, features_of_values=3)
    check(2, tensors, seed, rule, causal=True, modes=FEW[:2])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_other_dtypes(dtype, tolerance):
    tensors, seed, mask = problem(2, 16, 16, 4, 2, additive, dtype=dtype)
    check(2, tensors, seed, causal=True, modes=MODES[::3], tolerance=tolerance)
    check(2, tensors, seed, causal=True, window=5, modes=MODES[::3], tolerance=tolerance)
    check(2, tensors, seed, mask.float(), modes=MODES[::3], tolerance=tolerance)


def test_global_positions():
    """With q = 0 every query averages the values up to its own: row i is i / 2, on whichever rank it lies."""

    def main(rank, group):
        v = torch.arange(16.0).view(1, 1, 16, 1) / 4  # four ranks add up
        zeros = torch.zeros_like(v)
        one = torch.ones(1, 1)
        rows = fo.attention_reduce_scatter(zeros, zeros, v, one, causal=True, group=group)
        ten = fo.attention_reduce_scatter(
            zeros[:, :, :10], zeros[:, :, :10], v[:, :, :10], one, causal=True, group=group
        )
        two = fo.attention_reduce_scatter(zeros, zeros, v, one, causal=True, window=2, group=group)
        decoded = fo.attention_reduce_scatter(zeros[:, :, :1], zeros, v, one, group=group)
        return [each.flatten().tolist() for each in (rows, ten, two, decoded)]

    results = run_ranks(4, main)
    whole = [[row for result in results for row in result[case]] for case in range(4)]
    assert whole[0] == pytest.approx([i / 2 for i in range(16)])
    assert results[3][0] == pytest.approx([6, 6.5, 7, 7.5])
    assert whole[1] == pytest.approx([i / 2 for i in range(10)])
    assert whole[2] == pytest.approx([0, *(i - 0.5 for i in range(1, 16))])
    assert whole[3] == pytest.approx([7.5])


def test_gradients_without_strides_and_inputs_with_them():
    tensors, _, _ = problem(2, 6, 6, 4, 4)
    names = ("q", "k", "v", "w", "b")

    def strided(tensor):
        if tensor.dim() == 1:
            return torch.stack([tensor, tensor.neg()], 1)[:, 0]
        wide = torch.cat([tensor, tensor.neg()], -1).transpose(0, 1).contiguous().transpose(0, 1)
        return wide[..., : tensor.shape[-1]]

    def turned(tensor):
        return strided(tensor) if tensor.dim() == 1 else tensor.transpose(-1, -2).contiguous().transpose(-1, -2)

    def main(rank, group):
        part = {name: tensors[name] if name == "b" else tensors[name].chunk(2, 1)[rank] for name in names}
        ends = (
            lambda z: z.sum(),
            lambda z: z.mean(),
            lambda z: z.transpose(0, 2).sum(),
            lambda z: (z[:, :1].expand_as(z) * z).sum(),
        )
        for end in ends:
            found = []
            for prepare in (torch.Tensor.contiguous, strided, turned):
                made = [prepare(part[name]).detach().requires_grad_() for name in names]
                kept = [each.detach().clone() for each in made]
                z = fo.attention_reduce_scatter(*made, causal=True, group=group)
                end(z).backward()
                assert all(torch.equal(before, after) for before, after in zip(kept, made, strict=True))
                found.append([z.detach(), *(each.grad for each in made)])
            for other in found[1:]:
                torch.testing.assert_close(other, found[0], atol=1e-12, rtol=1e-12)

    run_ranks(2, main)


def test_under_autocast_backward_outside():
    tensors, seed, _ = problem(1, 8, 8, 4, 4, dtype=torch.float32)

    def main(rank, group):
        part = {name: t if name == "b" else t.chunk(2, 1)[rank] for name, t in tensors.items()}
        made = {name: t.clone().requires_grad_() for name, t in part.items()}
        with torch.autocast("cpu", torch.bfloat16):
            z = fo.attention_reduce_scatter(
                *made.values(), mask=torch.zeros(1, 1, 8, 8), causal=True, window=3, group=group
            )
        assert z.dtype == torch.bfloat16
        z.backward(seed.tensor_split(2, 1)[rank].bfloat16())
        assert {t.grad.dtype for t in made.values()} == {torch.float32}

    run_ranks(2, main)


def test_keys_that_no_query_of_a_piece_reads_are_not_read():
    """NaN there would show."""
    tensors, _, _ = problem(1, 16, 16, 2, 2)
    half = torch.arange(16) >= 8
    packed = half[:, None] == half
    for options in ({"causal": True, "window": 4}, {"causal": True}, {"mask": packed}):

        def main(rank, group, options=options):
            t = {name: tensor if name == "b" else tensor.chunk(2, 1)[rank].clone() for name, tensor in tensors.items()}
            for name in ("k", "v"):
                t[name][:, :, 8:] = torch.nan
            mode = fo.Overlap("flash", splits=1)
            z = fo.attention_reduce_scatter(*t.values(), group=group, overlap=mode, **options)
            assert z.isnan().all() if rank else z.isfinite().all()

        run_ranks(2, main)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"q": torch.ones(4, 8, FEATURES)}, "B, H, S, D"),
        ({"k": torch.ones(1, 4, 5, FEATURES)}, "B, H, S, D"),
        ({"k": torch.ones(1, 3, 8, FEATURES), "v": torch.ones(1, 3, 8, FEATURES)}, "heads"),
        ({"w": torch.ones(7, 15)}, "input features"),
        ({"mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)}, "mask=True"),
        ({"mask": torch.ones(1, 2, 8, 8, dtype=torch.bool)}, r"mask \[1, 2, 8, 8\] cannot be broadcast"),
        ({"mask": torch.ones(8, 8, dtype=torch.int64)}, "int64"),
        ({"mask": torch.ones(8, 8).requires_grad_()}, "trainable"),
        ({"mask": [[True]]}, "list"),
        ({"causal": False}, "causal=False"),
        ({"causal": False, "window": 3}, "with causal=True"),
        ({"window": 0}, "window=0"),
        ({"window": 2.5}, "2.5"),
        ({"window": 3}, "window=3"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": 0.5}, "dropout=0.5"),
        ({"dropout": "0.5"}, "dropout must be a number, not str"),
        ({"scale": torch.ones((), requires_grad=True)}, "scale must be a number, not Tensor"),
        ({"causal": "no"}, "causal must be True or False, not 'no'"),
        ({"k": torch.ones(1, 4, 9, FEATURES), "v": torch.ones(1, 4, 9, FEATURES)}, "8 and 9; queries that follow"),
        ({"kernel": "flash"}, "flash"),
        ({"kernel": F.scaled_dot_product_attention, "dropout": 0.5}, "without a kernel"),
        ({"kernel": lambda q, k, v, piece: None}, "NoneType"),
        ({"kernel": lambda q, k, v, piece: v[..., :1]}, r"\[1, 4, 8, 1\], not"),
        ({"kernel": lambda q, k, v, piece: F.dropout(q * 1.5)}, "random numbers"),
        ({"kernel": lambda q, k, v, piece: q.detach() * 2}, "not differentiable"),
        ({"kernel": lambda q, k, v, piece: q * torch.ones(1, dtype=q.dtype).requires_grad_()}, "trainable tensors"),
    ],
)
def test_refused_on_every_rank(change, told):
    tensors, _, _ = problem(1, 8, 8, 4, 4, dtype=torch.float32)

    def main(rank, group):
        t = {"causal": True, **tensors} | (change if rank else {})
        q, k, v, w, b = (t.pop(name) for name in ("q", "k", "v", "w", "b"))
        with pytest.raises((TypeError, ValueError, fo.PeerError), match=told):
            fo.attention_reduce_scatter(q.requires_grad_(), k, v, w, b, group=group, **t)

    run_ranks(2, main)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 300}])
def test_peak_memory(options):
    """Forward and backward need what attention and a row-parallel linear need, which keep as much for backward."""
    rows, size = 3072, 32

    def main(rank, group):
        def plain(q, k, v, w):
            rule = dense_rule(rows, rows, **options) if "window" in options else None
            out = F.scaled_dot_product_attention(q, k, v, rule, 0.0, rule is None and options.get("causal", False))
            return fo.linear_reduce_scatter(out.transpose(1, 2).flatten(2), w, group=group)

        def cut(*t):
            return fo.attention_reduce_scatter(*t, group=group, **options)

        peaks = []
        for layer in (plain, cut):
            t = [torch.randn(1, 2, rows, size, requires_grad=True) for _ in "qkv"]
            t.append(torch.randn(size, 2 * size, requires_grad=True))
            layer(*t).sum().backward()  # staging is kept from now on
            for each in t:
                each.grad = None
            with LiveBytes(t) as live:
                z = layer(*t)
                z.backward(torch.ones_like(z))
            peaks.append(live.peak)
        assert peaks[1] <= 1.05 * peaks[0]

    run_ranks(2, main)
