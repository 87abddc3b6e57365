"""What is kept of a run, step by step: on the screen, in metrics.jsonl, in report.txt, in the result."""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps
from pathlib import Path

from ..report import Report
from .metrics import Metrics
from .options import Options
from .result import ModeResult, Scale, as_json
from .screen import Screen
from .step import Taken
from .stopwatch import Timed
from .table import reported


class Journal:
    """The journal of one rank; rank 0 writes it, and the others only keep results.

    Args:
        options: of the run.
        scale: what turns seconds into rates.
        screen: of this rank.
        first: number of the first step; what metrics.jsonl has of this step and later ones is dropped.
    """

    def __init__(self, options: Options, scale: Scale, screen: Screen, first: int = 0) -> None:
        self._options, self.scale, self.screen = options, scale, screen
        self._writes = screen.rank == 0
        self._metrics = Metrics(options.out, first) if options.out is not None and self._writes else None
        self._report = None if options.out is None else options.out / "report.txt"

    def enter(self, result: ModeResult, number: int, timed: Timed[Taken], alone_s: float | None) -> str:
        """Enters step ``number``, counted from 0, of a mode; returns what there is to show of it.

        Args:
            alone_s: seconds of the same step without communication, measured; one rank alone communicates nothing.
        """
        taken, seconds = timed.value, timed.seconds
        exposed = 0.0 if alone_s is None else seconds - alone_s
        result.losses.append(taken.loss)
        result.seconds.append(seconds)
        result.blocked.append(timed.blocked_seconds)
        result.exposed.append(exposed)
        result.report = Report.of(timed.report, [*result.report.notes, *timed.report.notes])
        rate, mfu = self.scale.tokens / seconds, self.scale.mfu(seconds)
        if self._metrics is not None:
            self._metrics.add(
                step=number + 1, mode=result.mode, loss=taken.loss, grad_norm=taken.grad_norm, lr=taken.lr,
                step_seconds=seconds, tokens_per_s=rate, mfu=mfu, exposed_seconds=exposed,
                blocked_seconds=timed.blocked_seconds,
            )  # fmt: skip
        told = f"loss {taken.loss:.4f}  {rate:,.0f} tokens/s  MFU {mfu:.0%}"
        return f"{told}  exposed {exposed:.3f} s  blocked {timed.blocked_seconds:.3f} s"

    def step(self, number: int, text: str) -> None:
        """Shows a step."""
        self.screen.step(number + 1, self._options.steps, text)

    def report(self, results: Sequence[ModeResult]) -> None:
        """Shows what calls did and took in each mode's last step, layers added up; report.txt has every call site."""
        if not self._writes:
            return
        pages = []
        for result in results:
            title = f"report of rank 0: the last step, mode {result.mode}"
            self.screen.say("")
            self.screen.console.print(reported(result.report.by_layer(), f"{title}; times in ms"))
            pages.append(f"{title}\n\n{result.report}\n")
        self.screen.say("")
        if self._report is not None:
            self._report.write_text("\n".join(pages), encoding="utf-8")

    def close(self, results: Sequence[ModeResult], numbers: Path | None, trace: Path | None) -> None:
        """Writes the result, draws the losses, and says where everything is; the trace is there already."""
        if not self._writes:
            return
        if numbers is not None:
            numbers.write_text(dumps(as_json(results, self.scale), indent=1) + "\n", encoding="utf-8")
        picture = None if self._metrics is None else self._metrics.draw()
        for what, file in (("numbers", numbers), ("losses", picture), ("report", self._report), ("trace", trace)):
            if file is not None:
                self.screen.say(f"{what + ':':9}{file}" + ("  (for ui.perfetto.dev)" if file is trace else ""))
