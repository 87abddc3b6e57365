"""What a generation cost, as lines and a table."""

from __future__ import annotations

from rich.table import Table

from .run import Outcome


def speed(outcome: Outcome) -> list[str]:
    """A line on prefill, and one on decode."""
    result = outcome.result
    prompt, prefill_s = result["prompt_tokens"], result["prefill_seconds"]
    lines = [f"prefill: {prompt} tokens in {prefill_s:.4f} s, {prompt / prefill_s:.1f} tokens/s"]
    token_s = result["decode_seconds_per_token"]
    if token_s is not None:
        lines.append(f"decode: {len(result['tokens']) - 1} tokens, {token_s:.4f} s each, {1 / token_s:.1f} tokens/s")
    return lines


def modes(outcome: Outcome) -> Table | None:
    """Which mode each operator took in each phase, on rank 0; None where nothing was communicated."""
    drawn = Table(box=None, pad_edge=False)
    for head in ("phase", "operator", "asked", "taken", "calls", "MB sent", "blocked ms", "why"):
        drawn.add_column(head, justify="right" if head in ("calls", "MB sent", "blocked ms") else "left")
    for phase, records in outcome.records.items():
        for record in records:
            drawn.add_row(
                phase,
                record["op"],
                record["mode_asked"],
                f"{record['mode_taken']} {record['detail']}".rstrip(),
                str(record["calls"]),
                f"{record['bytes'] / 1e6:.3f}",
                f"{record['blocked_s'] * 1e3:.1f}",
                record["reason_code"],
            )
    return drawn if drawn.row_count else None
