"""What the library's own Python costs, per exchange and per compute step.

    python benchmarks/overhead.py [--pattern ring] [--repeats 300]

Two processes on loopback run an MLP of tiny pieces, with few and with many splits; what the further splits cost is the
cost of their exchanges and compute steps. Times are CPU seconds of the program's own thread, so that neither waiting
nor the wire counts; medians over all repeats.

    compute step   a kernel's call: finding its pieces, and the matmul calls; the bare calls are subtracted
    exchange       posting both halves, waiting for them, and the executor's loop
    other threads  what the waiting threads and the wire spend per exchange
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

from flashoverlap.lab import Lab

SPLITS = (8, 64)
ROWS, HIDDEN, FFN = 4 * SPLITS[1], 8, 16


def main() -> None:
    """Starts both ranks, or is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pattern", default="direct", choices=("direct", "ring"))
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        measure(arguments.pattern, arguments.repeats)
        return
    with Lab(2, "none") as lab:
        lab.run([sys.executable, __file__, *sys.argv[1:], "--rank"], prefix=False)


def measure(pattern: str, repeats: int) -> None:
    """One rank: measures, and on rank 0 prints."""
    import torch
    import torch.distributed as dist

    import flashoverlap.torch as fo
    from flashoverlap.torch.transport import transport_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x, up, down = torch.randn(ROWS // 2, HIDDEN), torch.randn(FFN // 2, HIDDEN), torch.randn(HIDDEN, FFN // 2)

    def run(splits: int) -> None:
        with torch.no_grad():
            fo.mlp(x, up, down, group=dist.group.WORLD, overlap=fo.Overlap("flash", pattern=pattern, splits=splits))

    def spans_of(splits: int) -> list:
        transport = transport_of(dist.group.WORLD)
        transport.spans = spans = []
        run(splits)
        transport.spans = None
        return spans

    program, others = slopes(run, repeats)
    few, many = (counts(pattern, splits) for splits in SPLITS)
    exchanges, steps = many[0] - few[0], many[1] - few[1]
    step = median(s.end_s - s.start_s for _ in range(20) for s in spans_of(SPLITS[1]) if s.track == "compute")
    bare = bare_step(x[: ROWS // 2 // SPLITS[1]], up, down)
    if dist.get_rank() == 0:
        print(f"mlp, 2 ranks, {pattern}: {exchanges} further exchanges and {steps} further compute steps a call")
        own = max(0.0, step - bare)
        print(f"per compute step  {1e6 * own:6.1f} us own Python, and {1e6 * bare:.1f} us bare torch calls")
        print(f"per exchange      {1e6 * (program - steps * step) / exchanges:6.1f} us in the program's thread")
        print(f"                  {1e6 * others / exchanges:6.1f} us in other threads, the wire's among them")
    dist.destroy_process_group()


def slopes(run: Callable[[int], None], repeats: int) -> tuple[float, float]:
    """CPU seconds that the further splits cost a call: of this thread, and of all others."""
    mine: dict[int, list[float]] = {splits: [] for splits in SPLITS}
    others: dict[int, list[float]] = {splits: [] for splits in SPLITS}
    for repeat in range(repeats + 10):
        for splits in SPLITS:
            thread_s, process_s = time.thread_time(), time.process_time()
            run(splits)
            thread_s, process_s = time.thread_time() - thread_s, time.process_time() - process_s
            if repeat >= 10:
                mine[splits].append(thread_s)
                others[splits].append(process_s - thread_s)
    few, many = SPLITS
    return median(mine[many]) - median(mine[few]), median(others[many]) - median(others[few])


def counts(pattern: str, splits: int) -> tuple[int, int]:
    """Exchanges and compute steps of one rank."""
    from flashoverlap.patterns import build
    from flashoverlap.schedule import Compute, Exchange

    widths = {"x": HIDDEN * 4, "h": FFN * 2, "p": HIDDEN * 4}
    program = build("mlp", [ROWS // 2] * 2, pattern=pattern, splits=splits, row_bytes=widths).programs[0]
    return sum(isinstance(op, Exchange) for op in program), sum(isinstance(op, Compute) for op in program)


def bare_step(x, up, down) -> float:
    """Seconds of the torch calls of an average compute step: up with activation, and down, are one step each."""
    import torch

    raised, out = x.new_empty(x.shape[0], up.shape[0]), x.new_empty(x.shape[0], down.shape[0])
    seconds = []
    with torch.no_grad():
        for _ in range(2000):
            start_s = time.perf_counter()
            torch.mm(x, up.t(), out=raised)
            torch.ops.aten.silu.out(raised, out=raised)
            torch.mm(raised, down.t(), out=out)
            seconds.append((time.perf_counter() - start_s) / 2)
    return median(seconds)


if __name__ == "__main__":
    main()
