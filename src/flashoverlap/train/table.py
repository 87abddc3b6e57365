"""A comparison as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from .options import Options
from .result import ModeResult, Scale, largest_difference

_HEADS = (
    "mode", "detail", "first loss", "last loss", "differs", "step s", "tokens/s", "MFU", "exposed s", "blocked s",
    "peak MB",
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
