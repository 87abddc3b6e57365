"""``fo.calibrate``: gives a group its Machine, from the disk where one was measured before and still holds, or anew.

[Note: never trusted in silence] A file is used only where every rank of the group has found the same machine, its place
is this one, and a transfer and a matmul, tried out in passing, take about what it says: a rate-limited link, a busy
neighbour or another cable is in no file name. Whatever is found wrong is told on every rank, in a warning or, at first
use, in the report, and the machine measured anew. All ranks decide by the same numbers: none of them measures alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from .. import choice
from ..machine import Machine
from . import machine_cache, work
from .errors import naming
from .look import WHAT, times_as_long
from .measured import SHAPE, measure
from .transport import agree, refusing, transport_of
from .wire import gathered

OP = "calibrate"
_HOLDS = 1.5  # a cached machine may be off by this factor either way


def calibrate(
    group: Any,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    nodes: Sequence[int] | None = None,
    folder: Path | None = None,
    anew: bool = False,
) -> Machine:
    """Measures what this group's wire and its ranks' arithmetic cost, for mode "auto" to plan with. Collective.

    It takes two seconds or a few the first time, and some 60 ms where a machine that was measured before still holds.
    All ranks return the same Machine, bit by bit: that of the slowest of them. Mode "auto" plans with it from then on.

    Args:
        group: the process group or one-dimensional DeviceMesh.
        dtype: of the matmuls.
        device: where the tensors of the group's operators are.
        nodes: ranks per node, in the order of the ranks, where those of a node share its wire to the others. Unless
            given, ranks on one host are a node. ``(n,)`` measures all wires as if there were no nodes.
        folder: where machines are kept from run to run; unless given, ``$XDG_CACHE_HOME/flashoverlap``, or
            ``~/.cache/flashoverlap``.
        anew: measure, whatever is kept.

    Raises:
        ValueError: nodes that are not those of so many ranks, or arguments that differ between ranks.
        PeerError: a peer died, stalled or refused the call.
        RuntimeError: an operator is running on this group.
    """
    device = torch.device(device)
    transport = transport_of(group, OP, torch.empty(0, device=device))
    return _calibrate(transport, dtype, device, nodes, folder or machine_cache.default_folder(), anew, _warn)


def _calibrate(
    transport: Any,
    dtype: torch.dtype,
    device: torch.device,
    nodes: Sequence[int] | None,
    folder: Path,
    anew: bool,
    tell: Callable[[str], None],
) -> Machine:
    with alone(transport, OP), torch.inference_mode(False), torch.no_grad():
        with refusing(transport):
            _check(transport, dtype, nodes)
        said = f"{OP}({dtype}, {device.type}, nodes={None if nodes is None else tuple(nodes)}, anew={anew})"
        agree(transport, said, said)
        with failing_together(transport):
            kept = Calibration(transport, dtype, device, nodes, folder, tell)
            machine = (None if anew else kept.found()) or kept.measured()
        transport.use(machine)
        return machine


def use_machine(group: Any, machine: Machine | None, *, device: torch.device | str = "cpu") -> None:
    """Plans this group's calls with a machine of the caller's from now on, or with none. Collective.

    Nothing is measured then, neither now nor at the first call in mode "auto". ``machine_file.read`` reads one from a
    file; None leaves "auto" to a rule of thumb.

    Raises:
        ValueError: the machine is of another number of ranks, or not the same on every rank.
        PeerError: a peer died, stalled or refused the call.
    """
    op = "use_machine"
    transport = transport_of(group, op, torch.empty(0, device=device))
    with alone(transport, op):
        with refusing(transport):
            if machine is not None:
                machine.check_ranks(transport.world_size)
        agree(transport, f"{op} {machine!r}", f"{op}({machine!r})")
        transport.use(machine)


def at_first_use(
    transport: Any, dtype: torch.dtype, device: torch.device, nbytes: int, tell: Callable[[str], None]
) -> bool:
    """Calibrates a group that has no machine yet, at the first call that moves enough; whether it did so.

    Args:
        transport: of the group.
        dtype: of the call.
        device: of the call.
        nbytes: that all ranks together have in the call; the same number on every rank.
        tell: takes what is wrong with a machine that was kept.
    """
    worth = transport.measures and transport.world_size > 1 and nbytes >= choice.WORTH_BYTES
    if worth:
        _calibrate(transport, dtype, device, None, machine_cache.default_folder(), False, tell)
    return worth


@contextmanager
def alone(transport: Any, op: str) -> Iterator[None]:
    """Keeps operators off the group's channels meanwhile."""
    if not transport.busy.acquire(blocking=False):
        raise RuntimeError(f"{op}: an operator is running on this group at the moment")
    try:
        with naming(op):
            yield
    finally:
        transport.busy.release()


@contextmanager
def failing_together(transport: Any) -> Iterator[None]:
    """Gives the transport up after an error, whatever it was: the peers wait for this rank's part."""
    try:
        yield
    except BaseException as error:
        transport.fail(error)
        raise


def _check(transport: Any, dtype: torch.dtype, nodes: Sequence[int] | None) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{OP}(dtype=...) takes a dtype that matmuls are made in, not {dtype!r}")
    if nodes is not None and (sum(nodes) != transport.world_size or min(nodes) < 1):
        raise ValueError(f"{OP}(nodes={tuple(nodes)}): the group has {transport.world_size} ranks")


class Calibration:
    """One calibration of a group: what is kept of it on disk, and what is measured."""

    def __init__(
        self,
        transport: Any,
        dtype: torch.dtype,
        device: torch.device,
        nodes: Sequence[int] | None,
        folder: Path,
        tell: Callable[[str], None],
    ) -> None:
        self._transport, self._dtype, self._device = transport, dtype, device
        self._folder, self._tell = folder, tell
        ranks = gathered(transport, [machine_cache.host_number(), machine_cache.folder_number(folder)])
        hosts, folders = ([each[index] for each in ranks] for index in (0, 1))
        nodes = _nodes(hosts) if nodes is None else tuple(nodes)
        self._nodes = nodes if len(nodes) > 1 and max(nodes) > 1 else ()  # else no ranks share a wire
        self._writes = folders.index(folders[transport.rank]) == transport.rank  # one rank a folder
        self._about = machine_cache.place(transport, dtype, device, hosts, self._nodes)

    @property
    def _path(self) -> Path:
        return machine_cache.path_of(self._folder, self._about)

    def found(self) -> Machine | None:
        """The machine that all ranks have kept, if it holds; else None, which is told unless no rank has any."""
        machine, complaint = machine_cache.find(self._folder, self._about)
        digest = machine_cache.number_of(repr(machine))
        ranks = gathered(self._transport, [float(machine is not None), float(bool(complaint)), digest])
        if not any(there or broken for there, broken, _ in ranks):
            return None
        if len(set(ranks)) > 1 or machine is None:
            self._tell(f"{OP}: {complaint or _differences(ranks)}; it is measured anew")
            return None
        off = _off(self._transport, machine, self._dtype, self._device)
        if off:
            self._tell(f"{OP}: machine file {self._path}: {off}; it is measured anew")
            return None
        return machine

    def measured(self) -> Machine:
        """The machine as measured now; kept for the next time."""
        machine = measure(self._transport, self._dtype, self._device, self._nodes)
        failed = machine_cache.keep(self._folder, self._about, machine) if self._writes else ""
        gathered(self._transport, [])  # a rank that is ahead may look for the file at its next group
        if failed:
            self._tell(f"{OP}: the machine could not be kept: {failed}; it will be measured again in the next run")
        return machine


def _nodes(hosts: Sequence[float]) -> tuple[int, ...]:
    """Ranks per node from each rank's host; none where those of a host are not neighbours."""
    nodes = tuple(len(list(ranks)) for _, ranks in groupby(hosts))
    return nodes if len(nodes) == len(set(hosts)) else ()


def _differences(ranks: Sequence[tuple[float, ...]]) -> str:
    """What the ranks have found, where they have not found the same."""
    kinds = {"a machine": [], "none": [], "one that cannot be used": []}
    for rank, (there, broken, _) in enumerate(ranks):
        kinds["one that cannot be used" if broken else "a machine" if there else "none"].append(rank)
    found = "; ".join(f"ranks {numbers} have {kind}" for kind, numbers in kinds.items() if numbers)
    others = " (not the same)" if len({digest for there, _, digest in ranks if there}) > 1 else ""
    return f"the ranks' caches differ: {found}{others}"


def _off(transport: Any, machine: Machine, dtype: torch.dtype, device: torch.device) -> str:
    """What takes another time than the machine says, in words; "" where it holds. The same on every rank."""
    watch = work.Stopwatch(device)
    expected_s = machine.matmul.seconds(*SHAPE, dtype.itemsize) if machine.matmul else 0.0
    matmul_s = watch.seconds(work.product_of(*SHAPE, dtype, device)) * watch.sharing
    slowest = max(factor for (factor,) in gathered(transport, [matmul_s / expected_s if expected_s else 1.0]))
    factors = (slowest, *times_as_long(transport, machine, device))
    return " and ".join(
        f"{what} takes {factor:.2g} times as long as it says"
        for what, factor in zip(("a matmul", *WHAT), factors, strict=True)
        if not 1 / _HOLDS < factor < _HOLDS
    )


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=5)
