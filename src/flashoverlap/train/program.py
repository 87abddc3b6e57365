"""Trains a language model in parallel, with its communication hidden behind its computation.

    torchrun --nproc-per-node 2 examples/train.py --steps 20
    flashoverlap train --ranks 2 --link 1gbit --steps 20      # the same program, with rate-limited links between ranks
    flashoverlap train --up 2 --tp 2 --link 1gbit --steps 20  # tokens over two ranks, heads and features over two

Every rank builds an unchanged model of transformers, and a call or two parallelize it (``parallel`` in
flashoverlap/train/model.py). The rest is an ordinary loop.
"""

from __future__ import annotations

from typing import Any

import torch
import typer

from flashoverlap.train.alone import computation_alone
from flashoverlap.train.checkpoint import Checkpoints
from flashoverlap.train.compare import Comparison
from flashoverlap.train.flops import measured_again, scale_of
from flashoverlap.train.inspection import peak_bytes, save_trace
from flashoverlap.train.journal import Journal
from flashoverlap.train.model import parallel
from flashoverlap.train.options import Options, taking_options
from flashoverlap.train.preflight import check, check_model
from flashoverlap.train.ranks import Ranks, joined, started
from flashoverlap.train.refusal import DISAGREE, refusing
from flashoverlap.train.result import ModeResult
from flashoverlap.train.screen import Screen
from flashoverlap.train.step import ADAMW, Training
from flashoverlap.train.text import Text


def train(options: Options, ranks: Ranks, text: Text, configuration: Any, screen: Screen) -> None:
    """Trains in one mode."""
    with refusing():  # nothing has been written yet
        model = parallel(options, ranks, configuration, options.how())
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        training = Training(model, optimizer, text, options, ranks.replicas)

    scale = scale_of(options, ranks, configuration)
    alone_s = computation_alone(options, ranks, text, configuration)
    checkpoints = Checkpoints(options, configuration, ranks)
    with refusing():
        first = checkpoints.begin(training, screen)
    result, journal = ModeResult(options.mode), Journal(options, scale, screen, first)

    with screen.steps(first, options.steps):
        for number in range(first, options.steps):
            timed = ranks.stopwatch.time(lambda number=number: training.step(number))
            screen.say_once(timed.report.notes)
            journal.step(number, journal.enter(result, number, timed, alone_s))
            if checkpoints.due(number + 1):
                checkpoints.save(training, number + 1)

    journal.scale = measured_again(scale, options, ranks)
    if options.json is not None:
        result.peak_bytes = peak_bytes(training, ranks, options.steps)
    if options.trace is not None:
        save_trace(training, ranks, options.steps, options.trace)
    journal.report([result])
    journal.close([result], options.json, options.trace)


def main(**chosen: Any) -> None:
    """Train a language model in parallel, with its communication hidden behind its computation."""
    with refusing():
        options = Options(**chosen)
        text, configuration = check(options), check_model(options)
        degrees = options.degrees(started())
    with joined(degrees) as ranks:
        screen = Screen(ranks.rank, options.terminal)
        screen.say(
            f"{options.model} on {ranks.count} ranks ({degrees}); text: {text.name}, {len(text.content):,} tokens"
        )
        if not options.compare:
            train(options, ranks, text, configuration, screen)
            return
        with refusing():
            comparison = Comparison(options, ranks, text, configuration)
        agree = comparison.run(screen)
    raise typer.Exit(0 if agree else DISAGREE)


if __name__ == "__main__":
    program = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    program.command()(taking_options(main))
    program()
