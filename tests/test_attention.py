"""attention_reduce_scatter beside one process: values and all gradients, masks by global positions."""

import pytest
import torch
import torch.nn.functional as F

import flashoverlap.torch as fo
from ranks import run_ranks
from unsharded import MODES

OUT, FEATURES = 7, 4


def problem(batch, seq, keys, heads, kv_heads, mask=None, dtype=torch.float64):
    random = torch.Generator().manual_seed(3)

    def draw(*size):
        return torch.randn(*size, generator=random, dtype=torch.float64).to(dtype)

    tensors = {
        "q": draw(batch, heads, seq, FEATURES),
        "k": draw(batch, kv_heads, keys, FEATURES),
        "v": draw(batch, kv_heads, keys, FEATURES),
        "w": draw(OUT, heads * FEATURES),
        "b": draw(OUT),
    }
    return tensors, draw(batch, seq, OUT), mask(draw, batch, heads, seq, keys) if mask else None


def unsharded(t, mask, causal, scale):
    rule = torch.ones(t["q"].shape[2], t["k"].shape[2], dtype=torch.bool).tril() if causal else mask
    out = F.scaled_dot_product_attention(t["q"], t["k"], t["v"], attn_mask=rule, scale=scale, enable_gqa=True)
    return F.linear(out.transpose(1, 2).flatten(2), t["w"], t["b"])


def check(n, tensors, seed, mask=None, causal=False, scale=None, modes=MODES, tolerance=1e-10):
    """Every rank has an nth of the heads; the sum over ranks is that of one process."""
    dtype = tensors["q"].dtype
    whole = {name: t.double().clone().requires_grad_() for name, t in tensors.items()}
    want = unsharded(whole, mask, causal, scale)
    want.backward(seed.double())

    def part(name, tensor, rank):
        return tensor if name == "b" else tensor.chunk(n, 1)[rank]

    def main(rank, group):
        here = mask if mask is None or mask.shape[1] == 1 else mask.chunk(n, 1)[rank]
        for overlap in modes:
            t = {name: part(name, tensor, rank).clone().requires_grad_() for name, tensor in tensors.items()}
            z = fo.attention_reduce_scatter(
                t["q"],
                t["k"],
                t["v"],
                t["w"],
                t["b"],
                mask=here,
                causal=causal,
                scale=scale,
                group=group,
                overlap=overlap,
            )
            own = want.tensor_split(n, 1)[rank]
            torch.testing.assert_close(z.double(), own, atol=tolerance, rtol=tolerance)
            z.backward(seed.tensor_split(n, 1)[rank].contiguous())
            for name, tensor in t.items():
                assert tensor.grad.dtype == dtype
                torch.testing.assert_close(
                    tensor.grad.double(), part(name, whole[name].grad, rank), atol=tolerance, rtol=tolerance
                )

    run_ranks(n, main)


def additive(draw, batch, heads, seq, keys):
    return draw(batch, heads, seq, keys)


def padding(draw, batch, heads, seq, keys):
    mask = torch.ones(batch, 1, 1, keys, dtype=torch.bool)
    mask[0, :, :, -2:] = False
    return mask


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_causal(n):
    for batch, seq, kv_heads in ((1, 16, 12), (2, 11, 12), (3, 2, 12), (2, 10, 1 if n == 1 else n), (1, 1, 12)):
        check(n, *problem(batch, seq, seq, 12, kv_heads)[:2], causal=True, modes=MODES if n < 3 else MODES[::2])


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("mask", [None, additive, padding])
def test_masks(n, mask):
    tensors, seed, rule = problem(2, 9, 13, 6, 6, mask)
    check(n, tensors, seed, rule, scale=0.3, modes=MODES[:4])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_other_dtypes(dtype, tolerance):
    tensors, seed, _ = problem(2, 16, 16, 4, 2, dtype=dtype)
    check(2, tensors, seed, causal=True, modes=MODES[::3], tolerance=tolerance)


def test_global_positions():
    """With q = 0 every query averages the values up to its own: row i is i / 2, on whichever rank it lies."""

    def main(rank, group):
        v = torch.arange(16.0).view(1, 1, 16, 1) / 4  # four ranks add up
        zeros = torch.zeros_like(v)
        rows = fo.attention_reduce_scatter(zeros, zeros, v, torch.ones(1, 1), causal=True, group=group)
        return rows.flatten().tolist()

    assert run_ranks(4, main)[3] == pytest.approx([6, 6.5, 7, 7.5])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.update(q=t["q"][0]), "B, H, S, D"),
        (lambda t: t.update(k=t["k"][:, :, :5]), "B, H, S, D"),
        (lambda t: t.update(k=t["k"][:, :3], v=t["v"][:, :3]), "heads"),
        (lambda t: t.update(w=t["w"][:, 1:]), "input features"),
        (lambda t: t.update(mask=torch.ones(1, 1, 8, 8, dtype=torch.bool)), "mask"),
    ],
)
def test_refused_on_every_rank(change, told):
    tensors, _, _ = problem(1, 8, 8, 4, 4)

    def main(rank, group):
        t = dict(tensors)
        if rank:
            change(t)
        with pytest.raises((ValueError, fo.PeerError), match=told):
            fo.attention_reduce_scatter(
                t["q"], t["k"], t["v"], t["w"], t["b"], mask=t.get("mask"), causal=True, group=group
            )

    run_ranks(2, main)
