"""A result as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

_COLUMNS = (
    ("mode", "mode", str),
    ("detail", "detail", str),
    ("seconds", "seconds", "{:.4f}".format),
    ("seconds_min", "min", "{:.4f}".format),
    ("seconds_max", "max", "{:.4f}".format),
    ("exposed_seconds", "exposed", "{:.4f}".format),
    ("blocked_seconds", "blocked", "{:.4f}".format),
    ("wire_cpu_seconds", "wire cpu", "{:.4f}".format),
    ("communication_reduction", "comm. reduction", "{:.1%}".format),
    ("latency_reduction", "latency reduction", "{:.1%}".format),
    ("wire_bytes", "MB sent", lambda count: f"{count / 1e6:.1f}"),
    ("max_abs_error", "max error", "{:.1e}".format),
)


def title(result: Mapping[str, Any]) -> str:
    """One line on what was run, and the bound."""
    rate = result["link_bytes_per_s"]
    link = "loopback" if rate is None else f"{rate * 8 / 1e6:g} Mbit/s a direction"
    sizes = ", ".join(f"{name} {value}" for name, value in result["shape"].items())
    bound = "" if result["bound_seconds"] is None else f"; bound {result['bound_seconds']:.4f} s"
    return f"{result['case']} {result['pass']}, {result['ranks']} ranks, {link}, {result['dtype']}, {sizes}{bound}"


def table(result: Mapping[str, Any]) -> Table:
    """The rows; a dash where a number does not apply. All times are seconds."""
    drawn = Table(title=title(result), title_justify="left", box=None, pad_edge=False)
    for index, (_, head, _) in enumerate(_COLUMNS):
        drawn.add_column(head, justify="left" if index < 2 else "right", no_wrap=index != 1)
    for row in result["rows"]:
        drawn.add_row(*("-" if row[key] is None else shown(row[key]) for key, _, shown in _COLUMNS))
    return drawn
