"""The same steps with off, the best slice and flash, beside each other: do they learn the same, and how fast?

Every mode has a model and an optimizer of its own, from the same seed. A round takes one step of each, beginning with
another mode in each round; so whatever else the machine does falls on all of them. A further model on a transport that
moves nothing takes the same steps, for what computation costs alone.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

import flashoverlap.torch as fo

from ..uncollected import uncollected
from .alone import compute_alone
from .flops import measured_again, scale_of
from .inspection import peak_bytes, save_trace
from .journal import Journal
from .model import parallel
from .options import SLICES, Options
from .ranks import Ranks
from .result import ModeResult, largest_difference
from .screen import Screen
from .step import ADAMW, Taken, Training
from .stopwatch import Timed
from .table import comparison
from .text import Text

TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}  # relative, of losses
_TRIES = 2  # rounds in which numbers of slices are tried


@dataclass
class Contestant:
    """One mode: what trains in it, and what it gave."""

    training: Training
    result: ModeResult


class Comparison:
    """All modes of one rank, built and ready.

    Args:
        options: of the run.
        ranks: that take part.
        text: that all modes read.
        configuration: of the model.

    Raises:
        ValueError: the model cannot be parallelized over these ranks.
    """

    def __init__(self, options: Options, ranks: Ranks, text: Text, configuration: Any) -> None:
        self._options, self._ranks, self._configuration = options, ranks, configuration

        def training(overlap: fo.Overlap) -> Training:
            model = parallel(options, ranks, configuration, overlap)
            optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
            return Training(model, optimizer, text, options, ranks.replicas)

        overlaps = {"off": fo.Overlap("off"), "slice": fo.Overlap("slice"), "flash": options.how()}
        self._modes = {mode: Contestant(training(overlap), ModeResult(mode)) for mode, overlap in overlaps.items()}
        self._modes["flash"].result.detail = f"splits {options.splits or 'auto'}"
        self._alone = compute_alone(options, ranks, text, configuration)

    def run(self, screen: Screen) -> bool:
        """Runs all steps, shows and writes what they gave, and returns whether the losses agree."""
        options, out = self._options, self._options.out
        if out is not None and screen.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
        journal = Journal(options, scale_of(options, self._ranks, self._configuration), screen)
        self._choose_slices(screen)
        with screen.steps(0, options.steps):
            for number in range(options.steps):
                self._round(number, journal)
        journal.scale = measured_again(journal.scale, options, self._ranks)
        for each in self._modes.values():
            each.result.peak_bytes = peak_bytes(each.training, self._ranks, options.steps)
        numbers, trace = (
            chosen or (None if out is None else out / default)
            for chosen, default in ((options.json, "compare.json"), (options.trace, "trace.json"))
        )
        if trace is not None:
            save_trace(self._modes["flash"].training, self._ranks, options.steps, trace)
        results = [each.result for each in self._modes.values()]
        journal.report(results)
        agree = self._conclude(results, journal)
        journal.close(results, numbers, trace)
        return agree

    def _choose_slices(self, screen: Screen) -> None:
        """Warms all modes up, and leaves mode slice with the number of slices that is fastest."""
        slices, tried = self._modes["slice"], (self._options.slices,) if self._options.slices else SLICES
        screen.say("warming up" + (f", and trying {', '.join(map(str, tried))} slices" if len(tried) > 1 else ""))
        for training in (self._alone, self._modes["off"].training, self._modes["flash"].training):
            self._pass(training)
        seconds: dict[int, list[float]] = {count: [] for count in tried}
        for turn in range(1 + _TRIES if len(tried) > 1 else 1):
            for count in tried:
                self._set_slices(count)
                took = self._pass(slices.training)
                seconds[count] += [took] if turn else []
        best = min(tried, key=lambda count: median(seconds[count] or [0.0]))
        self._set_slices(best)
        slices.result.detail = f"{best} slices"
        if len(tried) > 1:
            slices.result.detail += f" (best of {', '.join(map(str, tried))})"
            screen.say(f"slice: {slices.result.detail}")

    def _set_slices(self, count: int) -> None:
        shared: Any = self._modes["slice"].training.model._parallel
        shared.overlap = fo.Overlap("slice", slices=count)

    def _pass(self, training: Training) -> float:
        """Seconds of a forward and backward pass that leaves everything as it was."""
        timed = self._ranks.stopwatch.time(lambda: training.forward_backward(0))
        training.optimizer.zero_grad()
        return timed.seconds

    def _round(self, number: int, journal: Journal) -> None:
        """One step of every mode, and of computation alone."""
        every = {"compute": self._alone} | {mode: each.training for mode, each in self._modes.items()}
        order = list(every)
        order = order[number % len(order) :] + order[: number % len(order)]
        timed: dict[str, Timed[Taken]] = {}
        gc.collect()
        with uncollected():  # a collection would fall into some mode's time
            for mode in order:
                training = every[mode]
                timed[mode] = self._ranks.stopwatch.time(lambda training=training: training.step(number))
        told = []
        for mode, each in self._modes.items():
            journal.enter(each.result, number, timed[mode], timed["compute"].seconds)
            told.append(f"{mode} {timed[mode].value.loss:.4f} {timed[mode].seconds:.2f} s")
        journal.step(number, f"loss, time: {'  '.join(told)}  compute {timed['compute'].seconds:.2f} s")

    def _conclude(self, results: Sequence[ModeResult], journal: Journal) -> bool:
        """Shows the table, says whether the losses agree, and returns it."""
        screen = journal.screen
        screen.console.print(comparison(results, journal.scale, self._options))
        tolerance = TOLERANCES[self._options.dtype]
        off = results[0].losses
        worst = {each.mode: largest_difference(each.losses, off) for each in results[1:]}
        far = [mode for mode, difference in worst.items() if not difference <= tolerance]
        steps = f"{self._options.steps} steps"
        if far:
            told = ", ".join(f"{mode} by {worst[mode]:.1e}" for mode in far)
            screen.say(
                f"Losses DO NOT agree: over {steps} they differ from off's, {told}, and {tolerance:g} is allowed."
            )
        else:
            screen.say(f"Losses agree: over {steps} those of {' and '.join(worst)} are within {tolerance:g} of off's.")
        return not far
