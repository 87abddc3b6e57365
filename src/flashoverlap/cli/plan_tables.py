"""The answers of ``flashoverlap plan`` as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from ..cluster.calls import Call
from ..cluster.cluster import Cluster
from ..cluster.paper import Reproduction
from ..cluster.step import HEADROOM, Estimate
from ..cluster.sweep import Sweep
from ..plan import Plan

_MISFITS = 8  # are told one by one


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = (0,)) -> Table:
    """A table of numbers, but for the columns that are words."""
    table = Table(box=None, pad_edge=False)
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index in words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


# --- a step -----------------------------------------------------------------------------------------------------------


def step(found: Estimate) -> list[Any]:
    """Operator by operator, and the step."""
    work, model, cluster = found.work, found.model, found.cluster
    title = (
        f"{model.name} on {found.split.devices} x {cluster.name}: {found.split}; sequences of {work.seq} tokens, "
        f"{work.batch} at a time in each replica, {work.micro_batches} a step; {work.dtype}, shard {work.shard}"
        f"{', recompute' if work.recompute else ''}"
    )
    words = ("operator", "phase", "over", "mode", "calls")
    heads = (*words, "predicted\nms", "bound\nms", "kernels\nms", "exposed\nms", "MB\nsent")
    rows = [_call(call) for call in found.calls]
    return [
        title,
        _table(heads, rows, words=(0, 1, 2, 3)),
        "",
        f"step: {found.seconds * 1e3:.1f} ms, of which {found.exposed_s * 1e3:.1f} exposed and "
        f"{found.optimizer_s * 1e3:.1f} optimizer; {found.tokens_per_s:,.0f} tokens/s, MFU {found.mfu:.1%}, "
        f"communication hidden {found.hidden:.0%}",
        _memory(found),
        *_basis(cluster),
    ]


def _call(call: Call) -> tuple[str, ...]:
    return (
        call.site,
        call.phase,
        f"{call.axis} {call.ranks}" if call.mode else "",
        call.mode or "-",
        str(call.times),
        f"{call.seconds * 1e3:.3f}",
        f"{call.bound_s * 1e3:.3f}",
        f"{call.compute_s * 1e3:.3f}",
        f"{call.exposed_s * 1e3:.3f}",
        f"{call.bytes / 1e6:.1f}",
    )


def _memory(found: Estimate) -> str:
    parts = ", ".join(f"{name} {nbytes / 1e9:.1f}" for name, nbytes in asdict(found.memory).items())
    total, device = found.memory.total, found.cluster.memory_bytes
    if device is None:
        return f"memory: {total / 1e9:.1f} GB a device ({parts}); the machine's is not known (--memory)"
    fits = "fits" if found.fits else "DOES NOT FIT"
    return f"memory: {total / 1e9:.1f} GB a device ({parts}); {fits} into {HEADROOM:.0%} of {device / 1e9:g} GB"


def _basis(cluster: Cluster) -> list[str]:
    """Where the figures are from, and what was assumed."""
    if cluster.assumed is None:
        return [f"figures: {cluster.source}"]
    told = asdict(cluster.assumed)
    numbers = ", ".join(_number(name, value) for name, value in told.items())
    return [f"figures: {cluster.source}", f"assumed shares of them, and times: {numbers}"]


def _number(name: str, value: float) -> str:
    words = name.removesuffix("_s").replace("_", " ")
    return f"{words} {value * 1e6:g} us" if name.endswith("_s") else f"{words} {value:g}"


# --- a sweep ----------------------------------------------------------------------------------------------------------


def splits(found: Sweep) -> list[Any]:
    """The splits that fit, best first, and why others do not."""
    heads = ("dp", "up", "tp", "tokens/s", "MFU", "step ms", "exposed ms", "hidden", "GB", "tokens a step")
    rows = [
        (
            *map(str, each.split),
            f"{each.tokens_per_s:,.0f}",
            f"{each.mfu:.1%}",
            f"{each.seconds * 1e3:.1f}",
            f"{each.exposed_s * 1e3:.1f}",
            f"{each.hidden:.0%}",
            f"{each.memory.total / 1e9:.1f}",
            f"{each.tokens:,}",
        )
        for each in found.estimates
    ]
    told = [f"{each.split}: {each.code}: {each.reason}" for each in _one_of_each(found)]
    counts = ", ".join(f"{count} {code}" for code, count in found.counts().most_common())
    left = [f"not possible: {counts}; for instance", *told] if told else []
    none = [] if rows else ["no split is possible"]
    basis = _basis(found.estimates[0].cluster) if rows else []
    return [f"{found.devices} devices, best first", _table(heads, rows, words=()), "", *none, *left, *basis]


def _one_of_each(found: Sweep) -> list[Any]:
    """Some of those that do not fit: of each code the first and the last."""
    of_code = [[each for each in found.misfits if each.code == code] for code in found.counts()]
    return [each for some in of_code for each in dict.fromkeys((some[0], some[-1]))][:_MISFITS]


# --- one operator -----------------------------------------------------------------------------------------------------


def operator(found: Plan, cluster: Cluster) -> list[Any]:
    """All candidates, and what was taken."""
    rows = [
        (str(each), f"{each.seconds * 1e3:.3f}", f"{max(0.0, each.seconds - found.compute_s) * 1e3:.3f}")
        for each in found.candidates
    ]
    title = f"{found.op}, {sum(found.rows)} rows on {len(found.rows)} x {cluster.name}"
    runner_up = found.runner_up
    return [
        title,
        _table(("candidate", "predicted ms", "exposed ms"), rows),
        "",
        f"taken: {found.choice}; {found.code}: {found.reason}",
        *([f"runner-up: {runner_up}, {runner_up.seconds * 1e3:.3f} ms"] if runner_up else []),
        f"bound: {found.bound_s * 1e3:.3f} ms, the longer of kernels ({found.compute_s * 1e3:.3f} ms) and wire "
        f"({found.wire_s * 1e3:.3f} ms)",
        *_basis(cluster),
    ]


def operator_json(found: Plan, cluster: Cluster) -> dict[str, Any]:
    """The same in plain types."""
    candidates = [{**each._asdict(), "exposed_s": each.seconds - found.compute_s} for each in found.candidates]
    return {
        "op": found.op,
        "machine": cluster.name,
        "source": cluster.source,
        "ranks": len(found.rows),
        "rows": sum(found.rows),
        "choice": candidates[0],
        "runner_up": candidates[1] if len(candidates) > 1 else None,
        "predicted_s": found.predicted_s,
        "exposed_s": found.exposed_s,
        "compute_s": found.compute_s,
        "wire_s": found.wire_s,
        "bound_s": found.bound_s,
        "code": found.code,
        "reason": found.reason,
        "candidates": candidates,
    }


# --- the paper --------------------------------------------------------------------------------------------------------


def paper(found: Reproduction) -> list[Any]:
    """What went in, what came out, and what the sequence length changes."""
    setting, kernel = found.setting, found.machine.kernel("up")
    inputs = [
        f"in: an MLP of model dimension {setting.hidden} on {setting.ranks} tensor-parallel ranks, "
        f"batch {setting.batch}, sequence {setting.seq}, {setting.itemsize} bytes an element",
        f"in: {setting.communication_s * 1e3:g} ms of communication, and a vanilla latency that shrinks by "
        f"{setting.hidden_reduction:.1%} when all of it is hidden",
        f"in: slicing hides {setting.slice_reduction:.0%}; this chooses the number of slices and nothing else",
        f"assumed: a transfer starts after {setting.latency_s * 1e6:g} us, issuing an operation takes "
        f"{setting.issue_s * 1e6:g} us; additions cost nothing",
        f"out: a link of {found.machine.link.bytes_per_s / 1e9:.1f} GB/s in each direction, and "
        f"{2 * kernel.seconds_per_row * 1e6:.3f} us a row for both matmuls",
        f"out: {_sentence_on_slices(found)}",
        "out, from the simulator, on the schedules that calls run:",
    ]
    rows = [
        (
            row.mode,
            row.detail,
            f"{row.communication_ms:.2f}",
            f"{row.latency_ms:.1f}",
            f"{row.communication_reduction:.1%}",
            f"{row.latency_reduction:.1%}",
        )
        for row in found.rows
    ]
    heads = ("mode", "schedule", "exposed ms", "latency ms", "communication hidden", "latency reduced")
    trend = [
        (str(seq), *(f"{row.latency_reduction:.1%}" for row in rows if row.mode != "vanilla"))
        for seq, rows in found.trend.items()
    ]
    return [
        *inputs,
        _table(heads, rows, words=(0, 1)),
        "out: latency reduced, by sequence length, on the same machine",
        _table(("sequence", "slice", "flash"), trend, ()),
    ]


def _sentence_on_slices(found: Reproduction) -> str:
    share, asked = found.slice_counts[found.slices], found.setting.slice_reduction
    best = max(found.slice_counts, key=lambda count: found.slice_counts[count])
    near = ", ".join(
        f"{count}: {found.slice_counts[count]:.1%}"
        for count in (found.slices - 1, found.slices + 1)
        if count in found.slice_counts
    )
    most = "the most that any number of slices hides" if best == found.slices else f"the most is that of {best}"
    return f"{found.slices} slices come nearest to {asked:.0%}: they hide {share:.1%}, {most} ({near})"
