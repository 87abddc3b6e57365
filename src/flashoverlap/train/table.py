"""A comparison, and a report, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from ..report import Report
from .options import Options
from .result import ModeResult, Scale, largest_difference

_HEADS = (
    "mode", "detail", "first loss", "last loss", "differs", "step s", "tokens/s", "MFU", "exposed s", "blocked s",
    "peak MB",
)  # fmt: skip
_REPORT_HEADS = (
    "call site", "operator", "asked", "taken", "why", "calls", "MB sent", "measured", "predicted", "blocked",
)  # fmt: skip


def comparison(results: Sequence[ModeResult], scale: Scale, options: Options) -> Table:
    """A row a mode: losses and their largest relative difference to those of the first mode, medians over the steps,
    and the peak memory of the rank that needs most."""
    title = (
        f"{scale.model}, {scale.degrees.count} ranks ({scale.degrees}), {options.steps} steps of {scale.tokens} "
        f"tokens, {options.dtype}; matmul peak {scale.peak_flops_per_s / 1e9:.0f} GFLOP/s"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, head in enumerate(_HEADS):
        table.add_column(head, justify="left" if index < 2 else "right", no_wrap=index != 1)
    for result in results:
        row = result.as_json(scale)
        difference = largest_difference(result.losses, results[0].losses)
        table.add_row(
            result.mode,
            result.detail or "-",
            f"{result.losses[0]:.6f}",
            f"{result.losses[-1]:.6f}",
            "-" if result is results[0] else f"{difference:.1e}",
            f"{row['step_seconds']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['mfu']:.1%}",
            f"{row['exposed_seconds']:.3f}",
            f"{row['blocked_seconds']:.3f}",
            "-" if result.peak_bytes is None else f"{result.peak_bytes / 1e6:.1f}",
        )
    return table


def reported(report: Report, title: str) -> Table:
    """A row a record, times in milliseconds, with the reason's code alone; on a narrow terminal names are broken.

    What has run no schedule of its own, as a step's exchanges beside it, has measured nothing of its own.
    """
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, head in enumerate(_REPORT_HEADS):
        is_name = index < 5
        table.add_column(head, justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold")
    for record in report:
        times_s = (record.seconds or None, record.predicted_s, record.blocked_s)
        table.add_row(
            record.site,
            record.op,
            record.mode_asked,
            record.taken,
            record.reason_code,
            str(record.calls),
            f"{record.bytes / 1e6:.1f}",
            *("-" if each_s is None else f"{each_s * 1e3:.1f}" for each_s in times_s),
        )
    return table
