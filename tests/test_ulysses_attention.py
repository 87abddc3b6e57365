"""attention_all_to_all_linear, and attention_all_to_all before a linear, beside one process: values and all gradients,
heads that do not divide, masks."""

import pytest
import torch
import torch.nn.functional as F

import flashoverlap.torch as fo
from flashoverlap.torch.functional.attend import Heads
from flashoverlap.torch.functional.scores import Scores
from flashoverlap.torch.functional.shares import tensor_split
from flashoverlap.torch.functional.ulysses_attention import attention_all_to_all, attention_by_heads
from flashoverlap.torch.modules.heads import spread
from flashoverlap.torch.transport import transport_of
from ranks import outcomes, run_ranks
from unsharded import MODES

OUT, FEATURES = 7, 4


class Problem:
    """q, k, v of all heads and the output projection; every rank has some of the heads."""

    def __init__(self, batch, seq, heads, kv_heads, *, mask=None, dtype=torch.float64, keys=None, **options):
        random = torch.Generator().manual_seed(3)

        def draw(*size):
            return torch.randn(*size, generator=random, dtype=torch.float64).to(dtype)

        keys = seq if keys is None else keys
        self.heads, self.kv_heads, self.options = heads, kv_heads, options
        self.full = {
            "q": draw(batch, heads, seq, FEATURES),
            "k": draw(batch, kv_heads, keys, FEATURES),
            "v": draw(batch, kv_heads, keys, FEATURES),
            "w": draw(OUT, heads * FEATURES),
            "b": draw(OUT),
        }
        self.seed = draw(batch, seq, OUT)
        self.mask = mask(draw, batch, heads, seq, keys) if mask else None
        whole = {name: tensor.double().requires_grad_() for name, tensor in self.full.items()}
        self.want = self.unsharded(whole)
        self.want.backward(self.seed.double())
        self.grads = {name: tensor.grad for name, tensor in whole.items()}

    def unsharded(self, t):
        seq, keys, rule = t["q"].shape[2], t["k"].shape[2], self.mask
        if self.options.get("causal"):
            s, t_ = torch.arange(seq)[:, None], torch.arange(keys)
            reads = (t_ <= s) & (t_ > s - self.options.get("window", seq + 1))
            if rule is not None:
                reads = rule & reads if rule.dtype == torch.bool else rule.masked_fill(~reads, -torch.inf)
            rule = reads
        scale = self.options.get("scale")
        out = F.scaled_dot_product_attention(t["q"], t["k"], t["v"], attn_mask=rule, scale=scale, enable_gqa=True)
        return F.linear(out.transpose(1, 2).flatten(2), t["w"], t["b"])

    def run(self, n, rank, group, overlap=fo.Overlap(), frozen=(), lay=lambda tensor: tensor, alone=False, **more):
        heads = spread(self.heads, self.kv_heads, n)
        queries, keys = (slice(share.start, share.stop) for share in heads[rank])
        shares = [range(q.start * FEATURES, q.stop * FEATURES) for q, _ in heads]
        t = {
            name: tensor[:, queries if name == "q" else keys] if name in "qkv" else tensor
            for name, tensor in self.full.items()
        }
        t = {name: lay(tensor.clone()).detach().requires_grad_(name not in frozen) for name, tensor in t.items()}
        mask = self.mask if self.mask is None or self.mask.shape[1] == 1 else self.mask[:, queries]
        options, call = {"mask": mask, **self.options, **more}, {"group": group, "overlap": overlap, "shares": shares}
        if alone:
            rows = attention_all_to_all(Heads(t["q"], t["k"], t["v"], Scores(**options)), **call)
            z = F.linear(rows, t["w"], t["b"])
        else:
            z = fo.attention_all_to_all_linear(*t.values(), **options, **call)
        if z.requires_grad:
            z.backward(lay(self.seed.tensor_split(n, 1)[rank].contiguous()))
        return z, t, heads[rank]

    def check(self, n, overlap=fo.Overlap(), tolerance=1e-10, frozen=(), **more):
        results = run_ranks(n, lambda rank, group: self.run(n, rank, group, overlap, frozen, **more))
        found = {name: torch.zeros_like(tensor).double() for name, tensor in self.full.items()}
        for rank, (z, t, (queries, keys)) in enumerate(results):
            close(z, self.want.tensor_split(n, 1)[rank], tolerance, f"z on rank {rank}, {overlap}")
            for name, tensor in t.items():
                assert (tensor.grad is None) == (name in frozen)
                if tensor.grad is not None:
                    assert tensor.grad.dtype == tensor.dtype
                    own = queries if name == "q" else keys if name in "kv" else None
                    total = found[name] if own is None else found[name][:, own.start : own.stop]
                    total += tensor.grad
        for name in set(found) - set(frozen):
            close(found[name], self.grads[name], tolerance, f"gradient of {name}, {overlap}")


def close(found, want, tolerance, where):
    torch.testing.assert_close(
        found.double(), want, atol=tolerance, rtol=tolerance, msg=lambda text: f"{where}: {text}"
    )


def additive(draw, batch, heads, seq, keys):
    return draw(batch, heads, seq, keys)


def padding(draw, batch, heads, seq, keys):
    mask = torch.ones(batch, 1, 1, keys, dtype=torch.bool)
    mask[0, :, :, -2:] = False
    return mask


def documents(draw, batch, heads, seq, keys):
    """Packed sequences: three documents, of which none reads another."""
    of = torch.arange(seq) * 3 // max(seq, 1)
    return (of[:, None] == of)[None, None].expand(batch, 1, -1, -1)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_causal(n):
    for batch, seq, heads, kv_heads in ((1, 16, 8, 8), (2, 11, 8, 2), (3, 2, 6, 6), (1, 1, 8, 1))[: 2 if n == 8 else 4]:
        problem = Problem(batch, seq, heads, kv_heads, causal=True)
        for overlap in MODES if n == 2 else MODES[n % 3 :: 3]:
            problem.check(n, overlap)


@pytest.mark.parametrize(
    ("n", "heads", "kv_heads"), [(4, 8, 2), (2, 28, 7), (4, 6, 6), (4, 2, 2), (3, 8, 2), (8, 4, 1)]
)
def test_heads_that_ranks_do_not_divide(n, heads, kv_heads):
    """C16; ranks without heads too."""
    for options in ({}, {"causal": True}):
        problem = Problem(2, 9, heads, kv_heads, **options)
        for overlap in (MODES[0], MODES[3], MODES[5], MODES[8]):
            problem.check(n, overlap)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("mask", [None, additive, padding])
def test_masks(n, mask):
    problem = Problem(2, 9, 6, 6, mask=mask, keys=13, scale=0.3)
    for overlap in MODES[:5]:
        problem.check(n, overlap)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_before_a_linear_of_its_own(n):
    for batch, seq, heads, kv_heads in ((2, 11, 8, 2), (1, 7, 6, 6), (2, 2, 2, 2)):
        problem = Problem(batch, seq, heads, kv_heads, causal=True)
        for overlap in MODES:
            problem.check(n, overlap, alone=True)
    for mask in (additive, padding):
        Problem(2, 9, 6, 3, mask=mask, keys=13, scale=0.3).check(n, MODES[n], alone=True)
    Problem(2, 7, 4, 2, window=3, causal=True, dtype=torch.float32).check(n, MODES[n], 1e-5, alone=True)


@pytest.mark.parametrize("frozen", [("q",), ("k", "v"), ("w", "b"), ("q", "k", "v"), ("q", "k", "v", "w", "b")])
def test_before_a_linear_frozen(frozen):
    Problem(2, 7, 4, 2, causal=True).check(2, frozen=frozen, alone=True)


def test_windows_documents_and_causal_masks():
    for overlap in (MODES[0], MODES[5]):
        Problem(2, 11, 6, 3, causal=True, window=4).check(3, overlap)
        Problem(2, 11, 6, 3, causal=True, mask=documents).check(3, overlap)
        Problem(2, 11, 6, 3, causal=True, window=3, mask=additive).check(3, overlap)


@pytest.mark.parametrize(
    "frozen", [("q",), ("k", "v"), ("w",), ("w", "b"), ("q", "k", "v"), ("q", "k", "v", "w"), ("q", "k", "v", "w", "b")]
)
def test_frozen(frozen):
    Problem(2, 7, 4, 2, causal=True).check(2, frozen=frozen)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_other_dtypes(dtype, tolerance):
    for overlap in MODES[::3]:
        Problem(2, 16, 4, 2, dtype=dtype, causal=True).check(2, overlap, tolerance)


def test_strided_and_expanded():
    """C06, C07."""

    def turned(tensor):
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)

    problem = Problem(2, 7, 4, 2, causal=True)
    problem.check(2, lay=turned)

    def main(rank, group):
        _, t, _ = problem.run(2, rank, group, frozen=tuple(problem.full))
        found = []
        for of in (lambda z: z.sum(), lambda z: (z * torch.ones_like(z)).sum()):
            leaves = [tensor.detach().requires_grad_() for tensor in t.values()]
            of(fo.attention_all_to_all_linear(*leaves, causal=True, group=group)).backward()
            found.append([leaf.grad for leaf in leaves])
        return found

    for expanded, written in run_ranks(2, main):
        assert all(map(torch.equal, expanded, written))


def test_kernel_of_the_caller():
    def kernel(q, k, v, piece):
        scores = q @ k.transpose(-1, -2) * 0.5
        s, t = (torch.arange(each.start, each.stop) for each in (piece.queries, piece.keys))
        return scores.masked_fill(t > s[:, None], -torch.inf).softmax(-1) @ v

    Problem(2, 11, 4, 4, causal=True, scale=0.5).check(2, kernel=kernel)


def test_global_positions():
    """C24: with q = 0 every query averages the values up to its own: row i is i / 2, on whichever rank it lies."""

    def main(rank, group):
        v = torch.arange(16.0).view(1, 1, 16, 1)
        zeros = torch.zeros_like(v)
        rows = fo.attention_all_to_all_linear(zeros, zeros, v, torch.full((1, 4), 0.25), causal=True, group=group)
        return rows.flatten().tolist()

    assert run_ranks(4, main)[3] == pytest.approx([6, 6.5, 7, 7.5])


def of_heads(heads, width, group, overlap):
    return attention_by_heads(heads, torch.eye(width, dtype=heads.q.dtype), None, group=group, overlap=overlap)


def of_heads_alone(heads, width, group, overlap):
    return attention_all_to_all(heads, tensor_split(width, 2), group=group, overlap=overlap)


@pytest.mark.parametrize("attention", [of_heads, of_heads_alone])
def test_dropout(attention):
    """C39: ranks draw their own masks from equal seeds; backward draws that of forward again, however it is cut."""
    given = Scores(dropout=0.5)
    assert given.drawn(0).seed != given.drawn(0).seed
    overlaps = (fo.Overlap(), fo.Overlap("flash", splits=3), fo.Overlap("off"))
    seed = torch.arange(128, dtype=torch.float64).view(1, 8, 16)

    def main(rank, group):
        found = []
        for overlap in overlaps:
            v = torch.eye(8, dtype=torch.float64)[None, None].requires_grad_()
            heads = Heads(torch.zeros_like(v), torch.zeros_like(v), v, given._replace(seed=11 + rank))
            z = attention(heads, 16, group, overlap)
            z.backward(seed.tensor_split(2, 1)[rank])
            found.append((z.detach(), v.grad))
        return found

    first, second = run_ranks(2, main)
    for rank in (first, second):
        assert all(torch.equal(one, other) for each in rank[1:] for one, other in zip(rank[0], each, strict=True))
    weights = torch.cat([first[0][0], second[0][0]], 1)[0]  # softmax weights: queries, heads of both ranks
    assert set(weights.unique().tolist()) == {0.0, 0.25}
    assert not torch.equal(weights[:, :8], weights[:, 8:])
    for rank, (_, dv) in enumerate((first[0], second[0])):
        own = slice(8 * rank, 8 * rank + 8)
        close(dv[0, 0], weights[:, own].t() @ seed[0, :, own], 1e-10, "dv")


@pytest.mark.parametrize("alone", [False, True])
def test_order_of_events(alone):
    def main(rank, group):
        transport = transport_of(group)
        q, k, v = (torch.randn(1, 1, 4, FEATURES, requires_grad=True) for _ in range(3))
        weight = torch.randn(3, 2 * FEATURES, requires_grad=True)
        transport.spans = []
        if alone:
            z = attention_all_to_all(Heads(q, k, v), tensor_split(2 * FEATURES, 2), group=group)
        else:
            z = fo.attention_all_to_all_linear(q, k, v, weight, group=group)
        forward = [span.name for span in transport.spans if span.track == "compute"]
        transport.spans = []
        z.sum().backward()
        return forward, [span.name for span in transport.spans if span.track == "compute"]

    local = [] if alone else ["w=wgrad()"]
    assert run_ranks(2, main)[1] == (
        ["p1_0=attend(a1_0)", "p1_1=attend(a1_1)", "z1=mm(p1_1)", "z1=mm(p0_1)+z1"],
        ["p1_0=mm(a1_0)", "p1_1=mm(a1_1)", "y1_1=attend_backward(p1_1)", *local, "y0_1=attend_backward(p0_1)"],
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"q": lambda q: q[0]}, "B, H, S, D"),
        ({"v": lambda v: v.double()}, "one dtype"),
        ({"shares": lambda _: (range(8), range(8, 24))}, "not the features of this rank, range\\(8, 24\\)"),
        ({"shares": lambda _: (range(8), range(4, 12))}, "exactly once"),
        ({"shares": lambda _: ("a", "b")}, "range of features"),
        ({"overlap": lambda _: "flash"}, "Overlap"),
    ],
)
def test_attention_alone_is_refused_on_every_rank(change, told):
    def main(rank, group):
        t = {name: torch.randn(1, 2, 8, 4) for name in "qkv"}
        t |= {"shares": (range(8), range(8, 16)), "overlap": fo.Overlap()}
        if rank:
            t |= {name: become(t[name]) for name, become in change.items()}
        shares, overlap = t.pop("shares"), t.pop("overlap")
        attention_all_to_all(Heads(**t), shares, group=group, overlap=overlap)

    _, errors = outcomes(2, main)
    for error in errors:
        with pytest.raises((ValueError, TypeError, fo.PeerError), match=told):
            raise error


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"q": lambda q: q[0]}, "B, H, S, D"),
        ({"q": lambda q: q[:, :0], "k": lambda k: k[0]}, "B, H, S, D"),
        ({"k": lambda k: k[:, :, :5]}, "B, H, S, D"),
        ({"w": lambda w: w[:, 1:]}, "tensor_split|shares|features"),
        ({"b": lambda b: b[1:]}, "bias"),
        ({"mask": lambda _: torch.ones(1, 1, 3, 8, dtype=torch.bool)}, "mask"),
        ({"window": lambda _: 0}, "window"),
        ({"dropout": lambda _: 1.5}, "dropout"),
        ({"kernel": lambda _: lambda q, k, v, piece: q[..., :1]}, "kernel returned"),
        ({"shares": lambda _: [range(8)]}, "1 shares for 2 ranks"),
        ({"shares": lambda _: [range(8), range(4, 16)]}, "exactly once"),
        ({"causal": lambda _: False}, "disagree"),
        ({"q": lambda q: q[:, :, :7], "causal": lambda _: False}, "disagree"),
    ],
)
def test_refused_on_every_rank(change, told):
    def main(rank, group):
        t = {"q": torch.randn(1, 2, 8, 4), "k": torch.randn(1, 2, 8, 4), "v": torch.randn(1, 2, 8, 4)}
        t |= {"w": torch.randn(3, 16), "b": torch.randn(3), "causal": True}
        if rank:
            t |= {name: become(t.get(name)) for name, become in change.items()}
        weight, bias = t.pop("w"), t.pop("b")
        fo.attention_all_to_all_linear(weight=weight, bias=bias, group=group, **t)

    _, errors = outcomes(2, main)
    assert all(isinstance(error, ValueError | TypeError | fo.PeerError) for error in errors), errors
    for error in errors:
        with pytest.raises(type(error), match=told):
            raise error
