"""metrics.jsonl, a line a step, and the picture of the losses in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Metrics:
    """The metrics of the run in a folder, on one rank.

    Args:
        out: the folder, which is there.
        step: lines after this step are dropped: they are of steps that a resumed run takes again.
    """

    def __init__(self, out: Path, step: int) -> None:
        self._path, self._picture = out / "metrics.jsonl", out / "loss.png"
        kept = [line for line in _read(self._path) if line["step"] <= step]
        rewritten = self._path.with_name(".metrics.jsonl.partial")
        rewritten.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        rewritten.replace(self._path)

    def add(self, **line: Any) -> None:
        """Appends a line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def draw(self) -> Path:
        """Draws the loss of each mode over the steps; returns where."""
        from matplotlib.figure import Figure  # late: one rank needs it, and it takes a while to load

        curves: dict[str, tuple[list[int], list[float]]] = {}
        for line in _read(self._path):
            steps, losses = curves.setdefault(line["mode"], ([], []))
            steps.append(line["step"])
            losses.append(line["loss"])
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        for number, (mode, (steps, losses)) in enumerate(curves.items()):
            width = 1 + 2 * (len(curves) - 1 - number)  # thinner ones lie on top: curves that agree are all to be seen
            axes.plot(steps, losses, label=mode, linewidth=width, marker="." if len(steps) == 1 else "")
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per byte)")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self._picture, dpi=120)
        return self._picture


def _read(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file; a kill may have left half of one at the end."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
