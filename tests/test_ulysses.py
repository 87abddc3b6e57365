"""linear_all_to_all and all_to_all_linear beside one process: values and all gradients."""

import pytest
import torch
import torch.nn.functional as F

import flashoverlap.torch as fo
from flashoverlap.torch.transport import transport_of
from ranks import outcomes, run_ranks
from unsharded import MODES

SHAPES = (((11, 5), 0), ((2, 9, 5), -2), ((9, 2, 5), 0), ((3, 5), -2), ((0, 5), 0), ((2, 3, 2, 5), 1))
SIZES = (13, 4, 3)  # outputs of q, k, v
OUT = 7


def draw(*size, seed=3, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed + sum(size))
    return torch.randn(*size, generator=random, dtype=torch.float64).to(dtype)


def split(size, n):
    return [
        range(int(part[0]), int(part[-1]) + 1) if len(part) else range(0) for part in torch.arange(size).tensor_split(n)
    ]


def part(tensor, share):
    return tensor[..., share.start : share.stop]


def close(found, want, tolerance, where=""):
    torch.testing.assert_close(
        found.double(), want.double(), atol=tolerance, rtol=tolerance, msg=lambda text: f"{where}: {text}"
    )


def summed(tensors):
    return sum(tensor.double() for tensor in tensors)


class In:
    """q, k, v of one x, in one process and over ranks."""

    def __init__(self, shape, dim, n, shares=None, dtype=torch.float64, frozen=()):
        self.dim, self.n, self.frozen = dim, n, frozen
        self.given = shares
        self.shares = [own or split(size, n) for own, size in zip(shares or [None] * 3, SIZES, strict=True)]
        self.full = {"x": draw(*shape, dtype=dtype)}
        for name, size in zip("qkv", SIZES, strict=True):
            self.full |= {name: draw(size, shape[-1], dtype=dtype), name + "b": draw(size, dtype=dtype)}
        del self.full["kb"]
        whole = {name: tensor.double().requires_grad_() for name, tensor in self.full.items()}
        self.want = [F.linear(whole["x"], whole[name], whole.get(name + "b")) for name in "qkv"]
        self.seeds = [
            [part(draw(*want.shape, seed=9 + rank, dtype=dtype), share[rank]) for rank in range(n)]
            for want, share in zip(self.want, self.shares, strict=True)
        ]
        for want, share, seeds in zip(self.want, self.shares, self.seeds, strict=True):
            total = torch.zeros_like(want)
            for own, seed in zip(share, seeds, strict=True):
                part(total, own).add_(seed.double())
            want.backward(total, retain_graph=True)
        self.grads = {name: tensor.grad for name, tensor in whole.items()}

    def run(self, rank, group, overlap, lay=lambda tensor: tensor):
        t = {name: tensor.clone() for name, tensor in self.full.items()}
        t["x"] = t["x"].tensor_split(self.n, self.dim)[rank].contiguous()
        t = {name: lay(tensor).detach().requires_grad_(name not in self.frozen) for name, tensor in t.items()}
        weights, biases = [t[name] for name in "qkv"], [t.get(name + "b") for name in "qkv"]
        found = fo.linear_all_to_all(
            t["x"], weights, biases, group=group, shares=self.given, dim=self.dim, overlap=overlap
        )
        if any(tensor.requires_grad for tensor in t.values()):
            torch.autograd.backward(found, [lay(seeds[rank]) for seeds in self.seeds])
        return found, t

    def check(self, overlap=fo.Overlap(), tolerance=1e-10, lay=lambda tensor: tensor):
        results = run_ranks(self.n, lambda rank, group: self.run(rank, group, overlap, lay))
        for rank, (found, _) in enumerate(results):
            for output, want, share in zip(found, self.want, self.shares, strict=True):
                close(output, part(want, share[rank]), tolerance, f"output on rank {rank}")
        for name in self.full:
            of_ranks = [t[name].grad for _, t in results]
            if name in self.frozen:
                assert of_ranks == [None] * self.n
            elif name == "x":
                for rank, grad in enumerate(of_ranks):
                    close(grad, self.grads["x"].tensor_split(self.n, self.dim)[rank], tolerance, f"dx on rank {rank}")
            else:
                close(summed(of_ranks), self.grads[name], tolerance, f"gradient of {name}, {overlap}")


class Out:
    """The output projection, in one process and over ranks."""

    def __init__(self, shape, dim, n, shares=None, dtype=torch.float64, frozen=()):
        self.dim, self.n, self.given, self.frozen = dim, n, shares, frozen
        self.shares = shares or split(shape[-1], n)
        self.full = {
            "h": draw(*shape, dtype=dtype),
            "w": draw(OUT, shape[-1], dtype=dtype),
            "b": draw(OUT, dtype=dtype),
        }
        whole = {name: tensor.double().requires_grad_() for name, tensor in self.full.items()}
        self.want = F.linear(whole["h"], whole["w"], whole["b"])
        self.seed = draw(*self.want.shape, seed=8, dtype=dtype)
        self.want.backward(self.seed.double())
        self.grads = {name: tensor.grad for name, tensor in whole.items()}

    def run(self, rank, group, overlap, lay=lambda tensor: tensor):
        t = {name: tensor.clone() for name, tensor in self.full.items()}
        t["h"] = part(t["h"], self.shares[rank]).contiguous()
        t = {name: lay(tensor).detach().requires_grad_(name not in self.frozen) for name, tensor in t.items()}
        z = fo.all_to_all_linear(t["h"], t["w"], t["b"], group=group, shares=self.given, dim=self.dim, overlap=overlap)
        if z.requires_grad:
            z.backward(lay(self.seed.tensor_split(self.n, self.dim)[rank].contiguous()))
        return z, t

    def check(self, overlap=fo.Overlap(), tolerance=1e-10, lay=lambda tensor: tensor):
        results = run_ranks(self.n, lambda rank, group: self.run(rank, group, overlap, lay))
        for rank, (z, t) in enumerate(results):
            close(z, self.want.tensor_split(self.n, self.dim)[rank], tolerance, f"z on rank {rank}")
            if "h" not in self.frozen:
                close(t["h"].grad, part(self.grads["h"], self.shares[rank]), tolerance, f"dh on rank {rank}")
        for name in set(self.full) - {"h"}:
            of_ranks = [t[name].grad for _, t in results]
            if name in self.frozen:
                assert of_ranks == [None] * self.n
            else:
                close(summed(of_ranks), self.grads[name], tolerance, f"gradient of {name}, {overlap}")


both = pytest.mark.parametrize("side", [In, Out])


@both
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_values_and_gradients(side, n):
    for shape, dim in SHAPES if n < 4 else SHAPES[: 3 if n < 8 else 2]:
        problem = side(shape, dim, n)
        for overlap in MODES if n == 2 else MODES[n % 3 :: 3]:
            problem.check(overlap)


@both
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.15), (torch.float16, 0.02)])
def test_other_dtypes(side, dtype, tolerance):
    for overlap in (MODES[0], MODES[1], MODES[3], MODES[5]):
        side((2, 9, 5), 1, 2, dtype=dtype).check(overlap, tolerance)


def test_shares_that_overlap_are_empty_and_leave_gaps():
    """C16: ranks that have a key/value head in common, ranks that have none, features that nobody has."""
    q = [range(6), range(6, 6), range(6, 13), range(0)]
    k = [range(2), range(2), range(2, 4), range(2, 4)]
    v = [range(2), range(1, 2), range(2), range(1, 1)]
    for overlap in MODES[::2]:
        In((2, 9, 5), 1, 4, [q, k, v]).check(overlap)
        In((2, 9, 5), 1, 4, [q, None, v]).check(overlap)
    Out((2, 9, 5), 1, 3, [range(3, 5), range(0), range(3)]).check()
    In((9, 5), 0, 2, [[range(13)] * 2, None, None], dtype=torch.bfloat16).check(MODES[5], 0.15)


@pytest.mark.parametrize(
    ("side", "frozen"),
    [
        (In, "x"),
        (In, ["q", "k", "v"]),
        (In, ["q", "qb", "k", "v", "vb"]),
        (In, ["x", "q", "k", "vb"]),
        (In, ["x", "q", "qb", "k"]),
        (In, ["x", "q", "qb", "k", "v", "vb"]),
        (Out, "h"),
        (Out, "w"),
        (Out, ["w", "b"]),
        (Out, ["h", "b"]),
        (Out, ["h", "w"]),
        (Out, ["h", "w", "b"]),
    ],
)
def test_frozen(side, frozen):
    for n in (1, 3):
        side((2, 9, 5), 1, n, frozen=tuple(frozen)).check()


def turned(tensor):
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor.transpose(0, -1).contiguous().transpose(0, -1)


def every_second(tensor):
    wide = torch.full((*tensor.shape, 2), torch.nan, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


@both
@pytest.mark.parametrize("lay", [turned, every_second])
def test_strided(side, lay):
    """C07: what lies otherwise in memory, weights and gradients too."""
    for shape, dim in SHAPES[:3]:
        side(shape, dim, 2).check(fo.Overlap("flash", splits=2), lay=lay)


def test_gradients_that_are_no_memory():
    """C06: sums, means and expanded gradients have strides of 0."""
    losses = [(torch.sum, 1), (torch.mean, 1 / 12), (lambda out: out.t().sum(), 1)]

    def main(rank, group):
        ones = torch.ones(3, 4, dtype=torch.float64)
        for loss, each in losses:
            x, w, u = (draw(size, 4, seed=size + 1).requires_grad_() for size in (3, 4, 4))
            h = fo.linear_all_to_all(x, w, group=group)
            loss(h).backward()
            close(x.grad, each * ones @ w, 1e-10)
            close(w.grad, each * torch.ones(4, 3, dtype=torch.float64) @ x, 1e-10)
            features = h.detach().requires_grad_()
            loss(fo.all_to_all_linear(features, u, group=group)).backward()
            close(features.grad, each * u.sum(0).tensor_split(2)[rank].expand(6, 2), 1e-10)
        h = fo.linear_all_to_all(x, w, group=group)
        h.backward(torch.ones(1, 1, dtype=torch.float64).expand(6, 2))

    run_ranks(2, main)


@pytest.mark.parametrize(("batch_first", "heads"), [(True, 4), (True, 6), (False, 4), (False, 6)])
def test_there_and_back(batch_first, heads):
    """C32: x[b, s, h] = 100 b + 10 s + h with batch 2; rank r holds its heads of all s; the round trip is identity."""
    n, batch, length = 2, 2, 4
    b, s, h = torch.meshgrid(torch.arange(batch), torch.arange(length), torch.arange(heads), indexing="ij")
    full = (100 * b + 10 * s + h).double()
    dim = 1 if batch_first else 0
    full = full if batch_first else full.transpose(0, 1).contiguous()
    one = torch.eye(heads, dtype=torch.float64)

    def main(rank, group):
        x = full.tensor_split(n, dim)[rank].clone().requires_grad_()
        mine = fo.linear_all_to_all(x, one, group=group, dim=dim)
        assert torch.equal(mine, full.tensor_split(n, 2)[rank])
        back = fo.all_to_all_linear(mine, one, group=group, dim=dim)
        assert torch.equal(back, x)
        seed = draw(*x.shape, seed=rank)
        back.backward(seed)
        assert torch.equal(x.grad, seed)

    run_ranks(n, main)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_every_run(side, dtype):
    problem = side((2, 9, 5), 1, 3, dtype=dtype)
    first, second = (
        run_ranks(3, lambda rank, group: problem.run(rank, group, fo.Overlap("flash", splits=2))) for _ in range(2)
    )
    for (found, t), (again, u) in zip(first, second, strict=True):
        outputs = (found, again) if isinstance(found, tuple) else ((found,), (again,))
        assert all(map(torch.equal, *outputs))
        assert all(torch.equal(t[name].grad, u[name].grad) for name in t)


def test_sums_of_half_precision_are_rounded_once():
    """256 + 1 + 1 + 1 is 256 in bfloat16 if each sum is rounded, and 260 (of 259) if it is rounded once."""

    def main(rank, group):
        h = torch.full((4, 1), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
        z = fo.all_to_all_linear(h, torch.ones(1, 4, dtype=torch.bfloat16), group=group)
        x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
        y = fo.linear_all_to_all(x, torch.ones(4, 1, dtype=torch.bfloat16), group=group)
        y.backward(h)
        return z.item(), x.grad.item()

    assert run_ranks(4, main) == [(260, 260)] * 4


def test_without_gradients():
    def main(rank, group):
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                x = draw(2, 3, 4)
                h = fo.linear_all_to_all(x, torch.eye(4, dtype=torch.float64), group=group)
                back = fo.all_to_all_linear(h, torch.eye(4, dtype=torch.float64), group=group)
                assert torch.equal(back, x)
                assert not back.requires_grad

    run_ranks(2, main)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda x, w, kw: fo.linear_all_to_all(x[0, 0], w, **kw), "two dimensions"),
        (lambda x, w, kw: fo.linear_all_to_all(x, w[:, 1:], **kw), "input features"),
        (lambda x, w, kw: fo.linear_all_to_all(x, w, shares=[range(4)], **kw), "1 shares for 2 ranks"),
        (lambda x, w, kw: fo.linear_all_to_all(x, w, shares=[range(4), range(5)], **kw), "no range of the 4 features"),
        (lambda x, w, kw: fo.linear_all_to_all(x, w, shares=[0, 4], **kw), "a range of features for each rank"),
        (lambda x, w, kw: fo.linear_all_to_all(x, [w, w], shares=[None], **kw), "2 weights .* 1 lists"),
        (lambda x, w, kw: fo.linear_all_to_all(x, [w] * 27, **kw), "27 weights"),
        (lambda x, w, kw: fo.linear_all_to_all(x, w, shares=[range(1), range(1, 4)], **kw), "disagree"),
        (lambda x, w, kw: fo.linear_all_to_all(x[:, :1], w, **kw), "tensor_split gives"),
        (lambda x, w, kw: fo.linear_all_to_all(x, w, dim=2, **kw), "holds the features"),
        (lambda x, w, kw: fo.all_to_all_linear(x, w, **kw), "this rank has 4 features"),
        (lambda x, w, kw: fo.all_to_all_linear(x[..., :2], w, dim=-1, **kw), "holds the features"),
        (lambda x, w, kw: fo.all_to_all_linear(x[..., :2], w[0], **kw), "two dimensions"),
        (lambda x, w, kw: fo.all_to_all_linear(x[..., :2], w, w[0, :2], **kw), "bias"),
        (
            lambda x, w, kw: fo.all_to_all_linear(x[..., :2], w, shares=[range(2), range(1, 3)], **kw),
            "each of the 4 features exactly once",
        ),
        (lambda x, w, kw: fo.all_to_all_linear(x[:, :2, :2], w, **kw), "disagree"),
    ],
)
def test_refused_on_every_rank(call, told):
    def main(rank, group):
        x, w = draw(2, 3, 4), draw(4, 4)
        if rank:
            call(x, w, {"group": group})
        elif "all_to_all_linear" in call.__code__.co_names:
            fo.all_to_all_linear(x[..., :2], w, group=group)
        else:
            fo.linear_all_to_all(x, w, group=group)

    _, errors = outcomes(2, main)
    assert all(isinstance(error, ValueError | TypeError | fo.PeerError) for error in errors), errors
    for error in errors:
        with pytest.raises(type(error), match=told):
            raise error


def test_order_of_events():
    """Blocks of others are made first, and the own block last; what comes back is used own block first."""
    events = [(), ()]

    def main(rank, group):
        transport = transport_of(group)
        x = draw(2, 3).requires_grad_()
        transport.spans = []
        h = fo.linear_all_to_all(x, draw(4, 3), group=group, overlap=fo.Overlap("flash", splits=1))
        forward = [span.name for span in transport.spans if span.track == "compute"]
        transport.spans = []
        h.sum().backward()
        events[rank] = forward, [span.name for span in transport.spans if span.track == "compute"]

    run_ranks(2, main)
    assert events[1] == (
        ["p1_0=mm(a1_0)", "p1_1=mm(a1_1)"],
        ["z1=mm(p1_1)", "z1=mm(p0_1)+z1"],
    )
