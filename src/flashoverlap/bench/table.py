"""A result as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

_COLUMNS = (
    ("mode", "mode", str),
    ("detail", "detail", str),
    ("seconds", "seconds", "{:.4f}".format),
    ("seconds_min", "min", "{:.4f}".format),
    ("seconds_max", "max", "{:.4f}".format),
    ("predicted_seconds", "predicted", "{:.4f}".format),
    ("exposed_seconds", "exposed", "{:.4f}".format),
    ("blocked_seconds", "blocked", "{:.4f}".format),
    ("wire_cpu_seconds", "wire cpu", "{:.4f}".format),
    ("communication_reduction", "comm. reduction", "{:.1%}".format),
    ("latency_reduction", "latency reduction", "{:.1%}".format),
    ("first_matmul_seconds", "first matmul", "{:.4f}".format),
    ("gradients_ready_seconds", "gradients ready", "{:.4f}".format),
    ("wire_bytes", "MB sent", lambda count: f"{count / 1e6:.1f}"),
    ("peak_bytes", "MB peak", lambda count: f"{count / 1e6:.1f}"),
    ("max_abs_error", "max error", "{:.1e}".format),
)


def title(result: Mapping[str, Any]) -> str:
    """One line on what was run, and the bound."""
    rate = result["link_bytes_per_s"]
    link = "loopback" if rate is None else f"{rate * 8 / 1e6:g} Mbit/s a direction"
    if "nodes" in result:
        link += f", {len(result['nodes'])} nodes at {result['uplink_bytes_per_s'] * 8 / 1e6:g} Mbit/s"
    sizes = ", ".join(f"{name} {value}" for name, value in result["shape"].items())
    bound = "" if result["bound_seconds"] is None else f"; bound {result['bound_seconds']:.4f} s"
    return f"{result['case']} {result['pass']}, {result['ranks']} ranks, {link}, {result['dtype']}, {sizes}{bound}"


def table(result: Mapping[str, Any]) -> Table:
    """The rows; a dash where a number does not apply, and no column of dashes alone. All times are seconds."""
    drawn = Table(title=title(result), title_justify="left", box=None, pad_edge=False)
    rows = result["rows"]
    columns = [each for each in _COLUMNS if any(row[each[0]] is not None for row in rows)]
    for index, (_, head, _) in enumerate(columns):
        drawn.add_column(head, justify="left" if index < 2 else "right", no_wrap=index != 1)
    for row in rows:
        drawn.add_row(*("-" if row[key] is None else shown(row[key]) for key, _, shown in columns))
    return drawn


def sweep_table(name: str, results: Sequence[Mapping[str, Any]]) -> Table:
    """Several results side by side, a line for each value of the size that differs between them.

    Of each mode but compute: what it exposed, and by how much less that is than with off.
    """
    modes = [row["mode"] for row in results[0]["rows"] if row["mode"] != "compute"]
    drawn = Table(title=f"{results[0]['case']}, by {name}", title_justify="left", box=None, pad_edge=False)
    for head in (name, "compute", *(head for mode in modes for head in (mode, "")[: 1 + (mode != "off")])):
        drawn.add_column(head, justify="right")
    for result in results:
        rows = {row["mode"]: row for row in result["rows"]}
        cells = [str(result["shape"][name]), _shown(rows["compute"]["seconds"], "{:.4f}")]
        for mode in modes:
            cells.append(_shown(rows[mode]["exposed_seconds"], "{:.4f}"))
            if mode != "off":
                cells.append(_shown(rows[mode]["communication_reduction"], "{:.1%}"))
        drawn.add_row(*cells)
    return drawn


def _shown(number: float | None, form: str) -> str:
    return "-" if number is None else form.format(number)
