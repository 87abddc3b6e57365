"""Problems of attention with an output projection, and how they are compared with one process."""

import torch
import torch.nn.functional as F

import flashoverlap.torch as fo
from ranks import run_ranks
from unsharded import MODES

OUT, FEATURES = 7, 4


def problem(batch, seq, keys, heads, kv_heads, mask=None, dtype=torch.float64, features_of_values=FEATURES):
    """Tensors by name, the gradient of the result, and the mask that ``mask`` makes."""
    random = torch.Generator().manual_seed(3)

    def draw(*size):
        return torch.randn(*size, generator=random, dtype=torch.float64).to(dtype)

    tensors = {
        "q": draw(batch, heads, seq, FEATURES),
        "k": draw(batch, kv_heads, keys, FEATURES),
        "v": draw(batch, kv_heads, keys, features_of_values),
        "w": draw(OUT, heads * features_of_values),
        "b": draw(OUT),
    }
    return tensors, draw(batch, seq, OUT), mask(draw, batch, heads, seq, keys) if mask else None


def dense_rule(queries, keys, mask=None, causal=False, window=None):
    """All of the options that say who reads what as one mask."""
    s, t = torch.arange(queries)[:, None], torch.arange(keys)
    reads = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        reads = (t <= s) & (t > s - (window or keys))
    if mask is None:
        return reads
    return mask & reads if mask.dtype == torch.bool else torch.where(reads, mask.double(), -torch.inf)


def unsharded(t, rule, scale=None):
    out = F.scaled_dot_product_attention(t["q"], t["k"], t["v"], attn_mask=rule, scale=scale, enable_gqa=True)
    return F.linear(out.transpose(1, 2).flatten(2), t["w"], t["b"])


def part(n, name, tensor, rank):
    """That of the rank's heads, of which there may be fewer than ranks."""
    if name == "b":
        return tensor
    if name == "w" and tensor.shape[1] < n * FEATURES:
        return tensor.unflatten(1, (-1, FEATURES)).tensor_split(n, 1)[rank].flatten(1)
    return tensor.tensor_split(n, 1)[rank]


def check(n, tensors, seed, mask=None, *, scale=None, modes=MODES, tolerance=1e-10, **options):
    """Every rank has an nth of the heads; the sum over ranks is that of one process."""
    dtype = tensors["q"].dtype
    whole = {name: t.double().clone().requires_grad_() for name, t in tensors.items()}
    rules = {name: options[name] for name in ("causal", "window") if name in options}
    rule = dense_rule(whole["q"].shape[2], whole["k"].shape[2], mask, **rules)
    want = unsharded(whole, rule, scale)
    want.backward(seed.double())

    def main(rank, group):
        whole_mask = mask is None or mask.dim() < 4 or mask.shape[1] == 1
        own_mask = mask if whole_mask else mask.chunk(n, 1)[rank]
        for overlap in modes:
            t = {name: part(n, name, tensor, rank).clone().requires_grad_() for name, tensor in tensors.items()}
            z = fo.attention_reduce_scatter(
                *t.values(), mask=own_mask, scale=scale, group=group, overlap=overlap, **options
            )
            own = want.tensor_split(n, 1)[rank]
            torch.testing.assert_close(z.double(), own, atol=tolerance, rtol=tolerance)
            z.backward(seed.tensor_split(n, 1)[rank].contiguous())
            for name, tensor in t.items():
                assert tensor.grad.dtype == dtype
                torch.testing.assert_close(
                    tensor.grad.double(), part(n, name, whole[name].grad, rank), atol=tolerance, rtol=tolerance
                )

    run_ranks(n, main)
