"""What plans say that steps take, beside what they take: over workloads, sizes, links and modes, in the lab.

    python benchmarks/prediction.py [--quick] [--cases mlp,block] [--repeats 5] [--json prediction.json]

For each point of the grid two ranks run the workload of `flashoverlap bench` in every mode, values checked, in
interleaved rounds, and calibrate before each third of the rounds, since a machine that others use is not the same for
long. The prediction of a step is that of `flashoverlap bench` (flashoverlap/bench/predicted.py says of what it is
made). Its error is |predicted - measured| / measured, of the median step of the slowest rank and the median prediction.

    auto against best    how much longer `auto` takes than the best of the modes and splits that a hand could pick, as
                         the median over the rounds of how many times as long it took in the same round. Which is the
                         best is told from every second round, and by how much it is better from the others, and then
                         the other way round: of ten rows that are alike, that which had most luck would win, and not
                         because it is any faster (where two are as good as each other, the wrong one may be taken, so
                         this rather says too little than too much)

For data parallelism (`dp`), the step with nothing moved is not the plain model's, but the same in mode off.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from flashoverlap.bench.candidates import Candidate as Run
from flashoverlap.bench.candidates import candidates
from flashoverlap.bench.options import Options
from flashoverlap.bench.predicted import agreement, measured
from flashoverlap.bench.shapes import AttentionShape, BlockShape, MlpShape, StackShape, UlyssesShape
from flashoverlap.bench.summary import Candidate, Part

LINKS, QUICK_LINKS = ("200mbit", "1gbit", "4gbit"), ("200mbit", "1gbit")
SIZES, QUICK_SIZES = (256, 1024, 4096, 8192), (256, 2048)
FEW = (1, 8, 64)  # rows: where overlap has nothing to gain
FEW_CASES = ("mlp", "attention")
NODES_SIZE = 4096
SHORT_ROWS, MOST_ROUNDS = 8192, 32  # rows in all rounds together: steps of few vary more
CALIBRATIONS = 3
CASES = {
    "mlp": lambda seq: MlpShape(seq, 512, 2048),
    "block": lambda seq: BlockShape(seq, 512, 8, 4, 1408),
    "attention": lambda seq: AttentionShape(seq, 512, 8, 8),
    "ulysses": lambda seq: UlyssesShape(seq, 512, 8, 8),
    "dp": lambda seq: StackShape(4, 512, seq, "gradients", 2),
}
MODES = ("off", "collective", "slice", "flash", "auto")


def main() -> None:
    """Starts the ranks of each point, or is one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small grid: one workload, two sizes, two links")
    parser.add_argument("--cases", help=f"some of {','.join(CASES)}; with --quick mlp unless given")
    parser.add_argument("--repeats", type=int, default=6, help="rounds, if they are long; short ones are more")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        measure(arguments.rank)
        return
    names = arguments.cases.split(",") if arguments.cases else ["mlp"] if arguments.quick else list(CASES)
    points: list[dict[str, Any]] = []
    for options in grid(names, arguments.quick, arguments.repeats):
        measured = run(options)
        for point in measured:
            print(line(point), flush=True)
        points += measured
    result = summary(points)
    print("median error {median_error:.1%}, worst {worst_error:.1%}".format(**result))
    print(f"auto at worst {result['auto_vs_best_worst']:+.1%} against the best, {against_off(points):+.1%} against off")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def line(point: dict[str, Any]) -> str:
    """A point as a line."""
    shape = point["shape"]
    link = f"{point['link']}/{point['uplink']}" if point["uplink"] else point["link"]
    place = f"{point['case']} {shape.get('seq', shape.get('tokens'))} {link} {point['pass']}"
    predicted_ms, measured_ms = 1e3 * point["predicted_seconds"], 1e3 * point["measured_seconds"]
    what = f"{point['mode']} {point['detail']}"
    return f"{place:32} {what:24} {predicted_ms:9.2f} ms predicted {measured_ms:9.2f} measured {point['error']:6.1%}"


def grid(names: Sequence[str], quick: bool, repeats: int) -> Iterator[Options]:
    """All that is run, a point at a time; the last of a full grid of a workload is on two nodes of two ranks."""
    for name in names:
        for seq in QUICK_SIZES if quick else SIZES:
            passes = CASES[name](seq).passes
            for link in QUICK_LINKS if quick else LINKS:
                for phase in passes[:1] if quick else passes:
                    yield options_of(name, seq, phase, repeats, link=link)
        if not quick:
            for seq in FEW if name in FEW_CASES else ():
                yield options_of(name, seq, "forward", repeats)
            passes = CASES[name](NODES_SIZE).passes
            yield options_of(name, NODES_SIZE, passes[0], repeats, ranks=4, link="4gbit", nodes=2, uplink="1gbit")


def options_of(name: str, seq: int, phase: str, repeats: int, ranks: int = 2, **where: Any) -> Options:
    """One point of the grid."""
    rounds = max(repeats, min(MOST_ROUNDS, SHORT_ROWS // seq))
    return Options(CASES[name](seq), ranks, modes=modes_of(name), phase=phase, repeats=rounds, splits="best", **where)


def modes_of(case: str) -> tuple[str, ...]:
    """All modes; but the slices of ``bench ulysses`` are written by hand, and no plan speaks of them."""
    return tuple(mode for mode in MODES if (case, mode) != ("ulysses", "slice"))


def run(options: Options) -> list[dict[str, Any]]:
    """One point: a row for each thing that was timed."""
    with tempfile.TemporaryDirectory() as name, options.lab() as lab:
        folder, unread = Path(name), io.StringIO()
        (folder / "options.json").write_text(options.to_json(), encoding="utf-8")
        command = [sys.executable, __file__, "--rank", str(folder)]
        lab.run(command, env={"TORCH_CPP_LOG_LEVEL": "ERROR"}, stdout=unread, stderr=unread)
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(options.ranks)]
    timed = [Candidate([Part(**part) for part in parts]) for parts in zip(*(r["parts"] for r in ranks), strict=True)]
    wrong = [complaint for one in timed for complaint in one.complaints]
    if wrong:
        raise SystemExit(f"wrong values: {wrong}")
    return list(rows(options, timed))


def rows(options: Options, timed: Sequence[Candidate]) -> Iterator[dict[str, Any]]:
    """Predicted and measured of each candidate; the first of them moves nothing."""
    for one in timed[1:]:
        seconds = one.predicted(timed[0])
        assert seconds is not None, f"{one.row} of {options.shape} was not planned"
        yield {
            "case": options.shape.case,
            "shape": asdict(options.shape),  # pyright: ignore[reportArgumentType]
            "ranks": options.ranks,
            "link": options.link,
            "nodes": options.nodes,
            "uplink": options.uplink,
            "pass": options.phase,
            "mode": one.row,
            "detail": one.parts[0].detail,
            "predicted_seconds": seconds,
            "measured_seconds": one.seconds,
            "rounds": one.rounds,
            "error": abs(seconds - one.seconds) / one.seconds,
        }


def summary(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The result file: errors over all points, and how far auto is behind the best of the others, at worst."""
    errors = [point["error"] for point in points]
    return {
        "median_error": median(errors),
        "worst_error": max(errors),
        "auto_vs_best_worst": max(times_as_long_as_best(auto, others) - 1 for auto, others in by_place(points)),
        "points": list(points),
    }


def by_place(points: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Of each point of the grid the row of auto, and all others."""
    beside = ("case", "shape", "ranks", "link", "uplink", "pass")
    for auto in (point for point in points if point["mode"] == "auto"):
        yield auto, [p for p in points if all(p[key] == auto[key] for key in beside) and p["mode"] != "auto"]


def against_off(points: Sequence[dict[str, Any]]) -> float:
    """How much longer auto takes than off, in the same rounds, where that is most."""
    return max(
        times_as_long(auto["rounds"], other["rounds"]) - 1
        for auto, others in by_place(points)
        for other in others
        if other["mode"] == "off"
    )


def times_as_long_as_best(one: dict[str, Any], others: Sequence[dict[str, Any]]) -> float:
    """How many times as long as the best of the others a candidate took, by rounds that have not told which that is."""
    halves = [slice(0, None, 2), slice(1, None, 2)] if len(one["rounds"]) > 1 else [slice(None)] * 2
    found = []
    for known, unseen in (halves, halves[::-1]):
        best = min(others, key=lambda other: median(other["rounds"][known]))
        found.append(times_as_long(one["rounds"][unseen], best["rounds"][unseen]))
    return fmean(found)


def times_as_long(one: Sequence[float], other: Sequence[float]) -> float:
    """How many times as long as another a candidate took: what slows a whole round for a while does not count."""
    return median(mine / theirs for mine, theirs in zip(one, other, strict=True))


def measure(folder: Path) -> None:
    """One rank: runs the workload as the bench does, and calibrates now and then."""
    import torch.distributed as dist

    from flashoverlap.bench.measure import Bench

    class Predicting(Bench):
        """Calibrates now and then, after which each candidate runs once untimed, since its calls are planned anew."""

        def before_round(self, number: int) -> None:
            every = -(-self._options.repeats // CALIBRATIONS)
            if number % every == 0:
                measured(options, self._group, folder)
                self.agreement_s = agreement(self._group, self._barrier)
                self._round(self._untimed, number)

        def _untimed(self, index: int) -> None:
            self._contestants[index].run(self._grad)

    options = Options.from_json((folder / "options.json").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    control, rank = dist.new_group(backend="gloo"), dist.get_rank()
    measured(options, dist.group.WORLD, folder)
    bench = Predicting(options, list(timed_of(options)), dist.group.WORLD, lambda: dist.barrier(group=control))
    parts = [asdict(part) for part in bench.run()]
    (folder / f"rank{rank}.json").write_text(json.dumps({"parts": parts}), encoding="utf-8")
    dist.barrier(group=control)
    dist.destroy_process_group()


def timed_of(options: Options) -> Iterator[Run]:
    """What is timed: of data parallelism, the first is not the plain model, but the library's with nothing moved."""
    for one in candidates(options):
        yield replace(one, variant="parallel") if one.silent and options.shape.case == "dp" else one


if __name__ == "__main__":
    main()
