"""``flashoverlap calibrate``: in a lab, or as one of the ranks that torchrun started."""

from __future__ import annotations

import os
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..arguments import check_writable
from ..lab import Lab, LabError
from ..overlap import DTYPES
from .common import Json, LinkRate, Nodes, Ranks, Uplink, one_of, refused

if TYPE_CHECKING:
    from ..machine import Machine

_OF_THE_LAB = ("ranks", "link", "nodes", "uplink")
_ENV = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # inside a lab no address has a name, which is no news


def calibrate(
    context: typer.Context,
    ranks: Ranks = 2,
    link: LinkRate = "1gbit",
    nodes: Nodes = 1,
    uplink: Uplink = None,
    dtype: Annotated[str, typer.Option(help=f"Of the matmuls. {one_of(DTYPES)}")] = "float32",
    folder: Annotated[
        Path | None, typer.Option(help="Where machines are kept; flashoverlap in the user's cache unless given.")
    ] = None,
    json: Json = None,
) -> None:
    """Measure what wires, matmuls and steps cost, and keep that for mode auto: in a lab, or under torchrun."""
    try:
        if dtype not in DTYPES:
            raise ValueError(f"--dtype {dtype}: unknown; known: {', '.join(DTYPES)}")
        if json is not None:
            check_writable(json)
        if "RANK" in os.environ:
            _refuse_lab(context)
            _rank(dtype, folder, json)
            return
        lab = Lab(ranks, link, nodes=nodes, uplink=uplink)
    except ValueError as error:
        raise refused("calibrate", error) from None
    arguments = ["--dtype", dtype]
    arguments += ["--folder", str(folder.absolute())] if folder is not None else []
    arguments += ["--json", str(json.absolute())] if json is not None else []
    try:
        with lab:
            lab.run([sys.executable, "-m", "flashoverlap", "calibrate", *arguments], env=_ENV, prefix=False)
    except LabError as error:
        typer.echo(f"flashoverlap calibrate: {error}", err=True)
        raise typer.Exit(1) from None


def _refuse_lab(context: typer.Context) -> None:
    for name in _OF_THE_LAB:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ValueError(f"--{name} is of the lab, and these ranks have been started already (RANK is set)")


def _rank(dtype: str, folder: Path | None, json: Path | None) -> None:
    """One rank: measures with the others; the first one shows what they found, and writes it."""
    import torch
    import torch.distributed as dist

    from ..machine_file import write
    from ..torch.calibrate import calibrate as measured
    from ..torch.machine_cache import host_number, place
    from ..torch.transport import transport_of

    dist.init_process_group()
    try:
        placed: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(placed, (os.environ.get("GROUP_RANK", "0"), host_number()))
        nodes = [len(list(ranks)) for _, ranks in groupby(placed, lambda rank: rank[0])]
        hosts = [host for _, host in placed]
        device, kind = torch.device(_device()), getattr(torch, dtype)
        machine = measured(dist.group.WORLD, dtype=kind, device=device, nodes=nodes, folder=folder, anew=True)
        if dist.get_rank() == 0:
            _show(machine)
            if json is not None:
                transport = transport_of(dist.group.WORLD, like=torch.empty(0, device=device))
                write(json, machine, place(transport, kind, device, hosts, nodes))
    finally:
        dist.destroy_process_group()


def _device() -> str:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else f"{accelerator.type}:{os.environ.get('LOCAL_RANK', '0')}"


def _show(machine: Machine) -> None:
    """Prints a machine, a line for each of its parts."""
    wires = [("link", machine.link)] + [("uplink", machine.uplink)] * (machine.uplink is not None)
    wires += [(f"link of rank {rank}", each) for rank, each in enumerate(machine.links)]
    for name, wire in wires:
        if wire is not None:
            typer.echo(f"{name:<14}{wire.bytes_per_s / 1e6:.1f} MB/s, {wire.latency_s * 1e6:.0f} us a transfer")
    for size, seconds in machine.link.sizes:
        typer.echo(f"{'':<14}{size / 1024:.0f} KiB in {seconds * 1e3:.3f} ms")
    typer.echo(f"{'burst':<14}{machine.link.burst_bytes / 1024:.0f} KiB at once after a pause")
    if machine.matmul is not None:
        peak = machine.matmul.flops_per_s
        typer.echo(f"{'matmul':<14}{peak / 1e9:.1f} GFLOP/s at best, {machine.matmul.fixed_s * 1e6:.1f} us a call")
        for m, k, n, share in machine.matmul.efficiency:
            typer.echo(f"{'':<14}{m:>5.0f} x {k:>5.0f} x {n:>5.0f}  {share * peak / 1e9:8.1f} GFLOP/s")
        typer.echo(f"{'memory':<14}{machine.matmul.memory_bytes_per_s / 1e9:.1f} GB/s")
    typer.echo(f"{'contention':<14}matmuls take {machine.contention:.1%} longer while the wire is busy")
    typer.echo(f"{'step':<14}{machine.issue_s * 1e6:.1f} us of Python")
    fixed_ms = machine.collective_fixed_s * 1e3
    typer.echo(f"{'collectives':<14}{machine.collective_efficiency:.0%} of the link's rate, and {fixed_ms:.3f} ms each")
