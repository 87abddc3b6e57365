"""One rank of a benchmark: ``python -m flashoverlap.bench.worker DIRECTORY``, with the variables that torchrun sets.

Reads ``options.json`` in the directory and leaves ``rank<r>.json`` there.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .candidates import candidates
from .measure import Bench
from .options import Options
from .predicted import measured


def main(directory: Path) -> None:
    """Runs this rank and writes what it measured."""
    options = Options.from_json((directory / "options.json").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        control: Any = dist.new_group(backend="gloo")
        assert dist.group.WORLD is not None
        if options.ranks > 1:  # so that what is measured stands beside what is predicted
            measured(options, dist.group.WORLD, directory)
        bench = Bench(options, candidates(options), dist.group.WORLD, lambda: dist.barrier(group=control))
        parts = bench.run()
        spans = bench.traces() if options.trace else {}
        written = {"parts": [asdict(part) for part in parts], "spans": spans}
        (directory / f"rank{dist.get_rank()}.json").write_text(json.dumps(written), encoding="utf-8")
        dist.barrier(group=control)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
