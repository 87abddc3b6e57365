"""What a benchmark is to run: checked before anything starts, and handed to the ranks as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from ..arguments import count, words
from ..lab import Lab, Link
from ..overlap import DTYPES
from ..patterns import split_sizes
from .shapes import SHAPES, Shape

MODES = ("compute", "off", "collective", "slice", "flash", "auto")
PASSES = ("forward", "train")
PATTERNS = ("direct", "ring")
PEERS = {  # and what they can run
    "dtensor": ("mlp", "block", "model"),
    "megatron": ("mlp",),
    "hf": ("block", "model"),
    "deepspeed": ("ulysses",),
    "yunchang": ("ulysses",),
    "ddp": ("dp", "dp_llm"),
    "fsdp2": ("dp", "dp_llm"),
}


def _one_of(names: tuple[str, ...]) -> str:
    return f"One of {', '.join(names)}."


@dataclass(frozen=True)
class Options:
    """One benchmark; all but the shape are options of its command.

    Args:
        shape: the workload and its sizes.
        ranks: processes, one compute thread each.
        link: rate of each rank's link as in "1gbit", or "none" for plain loopback.
        modes: of :data:`MODES`; compute and off are always run.
        peers: of :data:`PEERS`.
        phase: "forward" or "train" (forward and backward).
        dtype: of all tensors.
        repeats: rounds that are timed.
        splits: of mode flash: "auto" (the library's rule), "best" (of several), or a number.
        pattern: of modes flash and auto.
        trace: whether one further run of flash is traced.
        nodes: of the ranks; those of one node share its uplink to the others.
        uplink: its rate, where there are several.

    Raises:
        ValueError: an unknown name or a number out of range; the message has the option and its value.
    """

    shape: Shape
    ranks: Annotated[int, count("Number of ranks.")] = 2
    link: Annotated[
        str, typer.Option(help="Rate of each rank's link, as in 400mbit or 2.5gbit; none for plain loopback.")
    ] = "1gbit"
    modes: Annotated[tuple[str, ...], words(f"Some of {','.join(MODES)}. compute and off are always run.")] = (
        "off",
        "slice",
        "flash",
    )
    peers: Annotated[
        tuple[str, ...], words(f"Those of {','.join(PEERS)} that can run the workload. None unless given.")
    ] = ()
    phase: Annotated[str, typer.Option("--pass", help=_one_of(PASSES))] = "forward"
    dtype: Annotated[str, typer.Option(help=_one_of(DTYPES))] = "float32"
    repeats: Annotated[int, count("Rounds that are timed.")] = 7
    splits: Annotated[str, typer.Option(help="Splits of mode flash: auto, a number, or best (of 1, 2, 4, 8).")] = "auto"
    pattern: Annotated[str, typer.Option(help=f"Of modes flash and auto. {_one_of(PATTERNS)}")] = "direct"
    trace: bool = False
    nodes: Annotated[int, count("Nodes of the ranks; those of one node share its uplink.")] = 1
    uplink: Annotated[
        str | None, typer.Option(help="Rate of each node's link to the others, as for --link; goes with --nodes.")
    ] = None

    def __post_init__(self) -> None:
        self.lab()  # checks what it is made of
        for option, values, known in (
            ("modes", self.modes, MODES),
            ("peers", self.peers, tuple(PEERS)),
            ("pass", (self.phase,), PASSES),
            ("dtype", (self.dtype,), DTYPES),
            ("pattern", (self.pattern,), PATTERNS),
        ):
            _check_known(option, values, known)
        if self.repeats < 1:
            raise ValueError(f"--repeats {self.repeats}: at least 1 is needed")
        if self.splits not in ("auto", "best") and not (self.splits.isdecimal() and int(self.splits) >= 1):
            raise ValueError(f"--splits {self.splits}: 'auto', 'best' or a whole number of 1 or more is needed")
        if self.trace and "flash" not in self.modes:
            raise ValueError(f"--trace draws a run of mode flash, which --modes {','.join(self.modes)} leaves out")
        self._check_shape()
        self._check_peers()

    def _check_shape(self) -> None:
        shape = self.shape
        shape.check(self.ranks)
        for option, value, possible in (("pass", self.phase, shape.passes), ("dtype", self.dtype, shape.dtypes)):
            if possible is not None and value not in possible:
                raise ValueError(f"--{option} {value}: bench {shape.case} runs {', '.join(possible)}")
        if shape.package and find_spec(shape.package) is None:
            raise ValueError(
                f"bench {shape.case} needs {shape.package}, which is not installed; pip install flashoverlap[hf]"
            )

    def _check_peers(self) -> None:
        case = self.shape.case
        for peer in self.peers:
            if case not in PEERS[peer]:
                can = dict.fromkeys(name.partition("_")[0] for name in PEERS[peer])
                raise ValueError(f"--peers {peer} can run bench {', bench '.join(can)}, not {case}")
            refusal = self.shape.refuses(peer)
            if refusal:
                raise ValueError(refusal)
        uneven = self.shape.uneven(self.ranks)
        if self.peers and uneven:
            peers = ",".join(self.peers)
            raise ValueError(f"--peers {peers} cannot take {uneven}, which {self.ranks} ranks do not divide")

    def lab(self) -> Lab:
        """The lab that the ranks run in."""
        return Lab(self.ranks, self.link, nodes=self.nodes, uplink=self.uplink)

    @property
    def ranks_of_nodes(self) -> tuple[int, ...]:
        """How many ranks each node has."""
        return tuple(split_sizes(self.ranks, self.nodes))

    @property
    def train(self) -> bool:
        """Whether the backward pass is run as well."""
        return self.phase == "train"

    @property
    def link_bytes_per_s(self) -> int | None:
        """The link's nominal rate; None on loopback."""
        return _bytes_per_s(self.link)

    @property
    def uplink_bytes_per_s(self) -> int | None:
        """That of the link between nodes; None where there is one node."""
        return _bytes_per_s(self.uplink)

    @property
    def ideal_bytes(self) -> int:
        """Bytes that the busiest rank has to move in one direction."""
        size = {"float64": 8, "float32": 4}.get(self.dtype, 2)
        return self.shape.ideal_elements(self.ranks, self.train) * size

    def to_json(self) -> str:
        """The options as text."""
        return json.dumps({**asdict(self), "case": self.shape.case})

    @staticmethod
    def from_json(text: str) -> Options:
        """Reads what :meth:`to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        shape = SHAPES[fields.pop("case")]
        for name in ("modes", "peers"):
            fields[name] = tuple(fields[name])
        return Options(**{**fields, "shape": shape(**fields["shape"])})


def _bytes_per_s(rate: str | None) -> int | None:
    link = Link.parse(rate)
    return None if link is None else link.bytes_per_s


def _check_known(option: str, values: tuple[str, ...], known: tuple[str, ...]) -> None:
    for value in values:
        if value not in known:
            raise ValueError(f"--{option} {value}: unknown; known: {', '.join(known)}")
    if len(set(values)) < len(values):
        raise ValueError(f"--{option} {','.join(values)}: named twice")
