"""The one oracle: every operator beside the unsharded module in float64, and how its tensors are sharded."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import flashoverlap.torch as fo

HIDDEN, OUT = 13, 7  # that no number of ranks divides
ROWS = "rows"  # sharded where the rows are

MODES = (
    fo.Overlap(),
    fo.Overlap("off"),
    fo.Overlap("slice", slices=3),
    fo.Overlap("collective"),
    *(fo.Overlap("flash", splits=splits) for splits in (1, 2, 5)),
    *(fo.Overlap("flash", pattern="ring", splits=splits) for splits in (1, 3)),
)
# rows that 2, 3, 4, 8 ranks do not divide; batch first; sequence first; fewer rows than ranks; none; four dimensions
SHAPES = (((11, 5), 0), ((2, 9, 5), -2), ((9, 2, 5), 0), ((3, 5), -2), ((0, 5), 0), ((2, 3, 2, 5), 1))


class Operator(NamedTuple):
    """An operator: sizes and sharding of its tensors by name, and both ways to compute it from those."""

    name: str
    shards: dict[str, Any]  # dimension that is sharded, ROWS, or None where every rank has all
    sizes: Callable[[tuple[int, ...]], dict[str, tuple[int, ...]]]
    unsharded: Callable[[dict[str, Any]], Any]
    sharded: Callable[..., Any]
    out: Any  # as shards, of the output

    def __repr__(self):
        return self.name


def _row(t, **kw):
    return fo.linear_reduce_scatter(t["x"], t["w"], t.get("b"), **kw)


def _all_reduce(t, **kw):
    return fo.linear_all_reduce(t["x"], t["w"], t.get("b"), **kw)


def _column(t, **kw):
    return fo.all_gather_linear(t["x"], t["w"], t.get("b"), **kw)


def _qkv(t, **kw):
    return fo.all_gather_linear(t["x"], [t["q"], t["k"], t["v"]], [t["qb"], None, t["vb"]], **kw)


def _all_reduce_grad(t, dim, **kw):
    return fo.all_reduce_grad_linear(t["x"], t["w"], t.get("b"), **kw)


def _all_reduce_grad_of_three(t, dim, **kw):
    return fo.all_reduce_grad_linear(t["x"], [t["q"], t["k"], t["v"]], [t["qb"], None, t["vb"]], **kw)


def _linear(t):
    return F.linear(t["x"], t["w"], t.get("b"))


COLUMN = Operator(
    "all_gather_linear",
    {"x": ROWS, "w": 0, "b": 0},
    lambda shape: {"x": shape, "w": (HIDDEN, shape[-1]), "b": (HIDDEN,)},
    _linear,
    _column,
    -1,
)
QKV = Operator(
    "all_gather_linear of three",
    {"x": ROWS, "q": 0, "qb": 0, "k": 0, "v": 0, "vb": 0},
    lambda shape: {
        "x": shape,
        "q": (HIDDEN, shape[-1]),
        "qb": (HIDDEN,),
        "k": (2, shape[-1]),
        "v": (3, shape[-1]),
        "vb": (3,),
    },
    lambda t: (F.linear(t["x"], t["q"], t["qb"]), F.linear(t["x"], t["k"]), F.linear(t["x"], t["v"], t["vb"])),
    _qkv,
    -1,
)
_ROW_SHARDS = {"x": -1, "w": 1, "b": None}
_ROW_SIZES = lambda shape: {"x": shape, "w": (OUT, shape[-1]), "b": (OUT,)}  # noqa: E731
ROW = Operator("linear_reduce_scatter", _ROW_SHARDS, _ROW_SIZES, _linear, _row, ROWS)
ALL_REDUCE = Operator("linear_all_reduce", _ROW_SHARDS, _ROW_SIZES, _linear, _all_reduce, None)
ALL_REDUCE_GRAD = Operator(
    "all_reduce_grad_linear", {"x": None, "w": 0, "b": 0}, COLUMN.sizes, _linear, _all_reduce_grad, -1
)
ALL_REDUCE_GRAD_QKV = QKV._replace(
    name="all_reduce_grad_linear of three", shards=QKV.shards | {"x": None}, sharded=_all_reduce_grad_of_three
)
LINEARS = (COLUMN, QKV, ROW, ALL_REDUCE, ALL_REDUCE_GRAD, ALL_REDUCE_GRAD_QKV)

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda rows: F.gelu(rows, approximate="tanh"),
    "relu": F.relu,
}


def mlp_operator(activation="silu", gated=True, biases=("up_bias", "gate_bias", "down_bias")):
    function = ACTIVATIONS.get(activation, activation)
    names = {"x", "up", "down", *biases} | ({"gate"} if gated else set())
    names -= set() if gated else {"gate_bias"}
    shards = {"x": ROWS, "up": 0, "gate": 0, "down": 1, "up_bias": 0, "gate_bias": 0, "down_bias": None}

    def sizes(shape):
        wide = (HIDDEN, shape[-1])
        every = {"x": shape, "up": wide, "gate": wide, "down": (OUT, HIDDEN)}
        every |= {"up_bias": (HIDDEN,), "gate_bias": (HIDDEN,), "down_bias": (OUT,)}
        return {name: size for name, size in every.items() if name in names}

    def unsharded(t):
        up = F.linear(t["x"], t["up"], t.get("up_bias"))
        hidden = function(F.linear(t["x"], t["gate"], t.get("gate_bias"))) * up if gated else function(up)
        return F.linear(hidden, t["down"], t.get("down_bias"))

    def sharded(t, **kw):
        rest = {name: tensor for name, tensor in t.items() if name not in ("x", "up", "down")}
        return fo.mlp(t["x"], t["up"], t["down"], activation=activation, **rest, **kw)

    return Operator("mlp", {name: shards[name] for name in sorted(names)}, sizes, unsharded, sharded, ROWS)


MLP = mlp_operator()


def shard(tensor, how, rank, world_size, dim=-2):
    """What a rank holds of a tensor: its own copy, sharded by the rule of torch.tensor_split."""
    how = dim if how == ROWS else how
    return (tensor if how is None else torch.tensor_split(tensor, world_size, how)[rank]).clone(
        memory_format=torch.contiguous_format
    )


class Problem:
    """Full tensors of an operator in float64 (rounded to ``dtype``), what comes out of it, and all gradients.

    ``wants`` names the tensors that want a gradient, all if it is not given.
    """

    def __init__(self, op, shape, dim=-2, *, dtype=torch.float64, wants=None, seed=7, forward_only=False):
        self.op, self.dim, self.dtype = op, dim, dtype
        random = torch.Generator().manual_seed(seed)

        def draw(size):
            return torch.randn(*size, generator=random, dtype=torch.float64).to(dtype).double()

        self.full = {name: draw(size) for name, size in op.sizes(tuple(shape)).items()}
        self.wants = () if forward_only else tuple(self.full) if wants is None else tuple(wants)
        leaves = {name: full.clone().requires_grad_(name in self.wants) for name, full in self.full.items()}
        outputs = _tuple(op.unsharded(leaves))
        self.outputs = tuple(output.detach() for output in outputs)
        self.seeds = tuple(draw(output.shape) for output in outputs)
        if self.wants:
            torch.autograd.backward([o for o in outputs if o.requires_grad], self._seeds_for(outputs, self.seeds))
        self.grads = {name: leaf.grad for name, leaf in leaves.items()}

    @staticmethod
    def _seeds_for(outputs, seeds):
        return [seed for output, seed in zip(outputs, seeds, strict=True) if output.requires_grad]

    def shards(self, rank, world_size, lay=lambda tensor: tensor):
        """This rank's tensors, as leaves; ``lay`` may lay them out otherwise."""
        return {
            name: lay(shard(full, self.op.shards[name], rank, world_size, self.dim).to(self.dtype))
            .detach()
            .requires_grad_(name in self.wants)
            for name, full in self.full.items()
        }

    def run(self, rank, group, overlap=fo.Overlap(), *, lay=lambda tensor: tensor, tensors=None, **more):
        """Runs the operator on this rank, forward and backward: (outputs, tensors with gradients). Holds on the way
        that the caller's tensors are left alone."""
        n = group.size()
        tensors = self.shards(rank, n, lay) if tensors is None else tensors
        before = {name: (tensor.detach().clone(), tensor._version) for name, tensor in tensors.items()}
        outputs = _tuple(self.op.sharded(tensors, group=group, dim=self.dim, overlap=overlap, **more))
        seeds = [shard(seed, self.op.out, rank, n, self.dim).to(self.dtype) for seed in self.seeds]
        kept = [seed.clone() for seed in seeds]
        if self.wants:
            torch.autograd.backward([o for o in outputs if o.requires_grad], self._seeds_for(outputs, seeds))
        for name, (clone, version) in before.items():
            assert torch.equal(tensors[name], clone), f"{self.op} wrote to {name}"
            assert tensors[name]._version == version, f"{self.op} wrote to {name}"
        assert all(map(torch.equal, seeds, kept)), f"{self.op} wrote to a gradient"
        return outputs, tensors

    def compare(self, rank, world_size, outputs, tensors, tolerance=1e-10, saying=""):
        """Holds outputs and gradients against the unsharded ones; None where none was asked for."""
        for index, (output, full) in enumerate(zip(outputs, self.outputs, strict=True)):
            want = shard(full, self.op.out, rank, world_size, self.dim)
            self._close(output, want, tolerance, f"{saying} output {index} on rank {rank}")
        for name, tensor in tensors.items():
            where = f"{saying} gradient of {name} on rank {rank}"
            if name not in self.wants:
                assert tensor.grad is None, where
                continue
            want = shard(self.grads[name], self.op.shards[name], rank, world_size, self.dim)
            assert tensor.grad is not None, where
            self._close(tensor.grad, want, tolerance, where)

    def _close(self, found, want, tolerance, where):
        assert found.dtype == self.dtype, where
        torch.testing.assert_close(
            found.detach().double(), want, atol=tolerance, rtol=tolerance, msg=lambda text: f"{self.op} {where}: {text}"
        )

    def check(self, rank, group, overlap=fo.Overlap(), tolerance=1e-10, **more):
        """Runs and compares."""
        outputs, tensors = self.run(rank, group, overlap, **more)
        self.compare(rank, group.size(), outputs, tensors, tolerance, f"{overlap} x {tuple(self.full['x'].shape)}")


def _tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)
