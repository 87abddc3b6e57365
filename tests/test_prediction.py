"""benchmarks/prediction.py: its arithmetic, and one point of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flashoverlap.bench.options import Options
from flashoverlap.bench.shapes import MlpShape
from flashoverlap.bench.summary import Candidate, Part
from flashoverlap.lab import lab_unavailable

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "prediction.py"
sys.path.insert(0, str(SCRIPT.parent))

prediction = pytest.importorskip("prediction")


def test_a_step_is_its_calls_and_what_is_in_none():
    options = Options(MlpShape(64, 8, 16), 2, "1gbit")
    compute = [Part("compute", seconds=[each] * 3, predicted_s=[None] * 3, in_calls_s=[0.5] * 3) for each in (1.0, 1.5)]
    off = [Part("off", seconds=[each] * 3, predicted_s=[2.0] * 3, in_calls_s=[3.0] * 3) for each in (4.0, 5.0)]
    (point,) = prediction.rows(options, [Candidate(compute), Candidate(off)])
    assert point["mode"] == "off"
    assert point["predicted_seconds"] == 2.0 + (1.5 - 0.5)
    assert point["measured_seconds"] == 5.0
    assert point["error"] == pytest.approx(2 / 5)
    assert point["rounds"] == [5.0] * 3


def test_auto_is_compared_with_the_best_of_the_same_point():
    def point(mode, seconds, link="1gbit", error=0.1):
        place = {"case": "mlp", "shape": {"seq": 1}, "ranks": 2, "link": link, "uplink": None, "pass": "forward"}
        rounds = [slowly * seconds for slowly in (1, 3, 5)]
        return {**place, "mode": mode, "measured_seconds": 3 * seconds, "rounds": rounds, "error": error}

    points = [
        *(point("off", 4.0), point("flash", 2.0), point("auto", 2.5)),
        *(point("off", 1.0, "4gbit"), point("flash", 9.0, "4gbit", 0.4), point("auto", 1.1, "4gbit")),
    ]
    result = prediction.summary(points)
    assert result["auto_vs_best_worst"] == pytest.approx(0.25)
    assert (result["median_error"], result["worst_error"]) == (0.1, 0.4)
    assert result["points"] == points
    assert prediction.against_off(points) == pytest.approx(0.1)


def test_the_best_is_told_by_other_rounds_than_those_that_auto_is_compared_in():
    def rounds(*seconds):
        return {"rounds": list(seconds)}

    auto, lucky, unlucky = rounds(2, 2, 2, 2), rounds(1, 4, 1, 4), rounds(4, 1, 4, 1)
    assert prediction.times_as_long_as_best(auto, [lucky, unlucky]) == 0.5  # in the rounds where luck was with others
    assert prediction.times_as_long_as_best(auto, [lucky, rounds(1, 1, 1, 1)]) == 1.25
    assert prediction.times_as_long_as_best(rounds(3), [rounds(2), rounds(4)]) == 1.5


def test_every_point_of_the_grid_can_be_run():
    full = list(prediction.grid(list(prediction.CASES), quick=False, repeats=3))
    quick = list(prediction.grid(["mlp"], quick=True, repeats=3))
    # dp is training in any case, each has a point on two nodes, and two have few rows
    assert len(full) == 4 * (4 * 3 * 2 + 1) + 4 * 3 + 1 + 2 * 3
    assert max(each.repeats for each in full) == prediction.MOST_ROUNDS
    assert [each.ranks_of_nodes for each in full if each.nodes > 1] == [(2, 2)] * 5
    assert len(quick) == 4
    assert "slice" in full[0].modes
    assert all(("slice" in each.modes) != (each.shape.case == "ulysses") for each in full)  # written by hand there


@pytest.mark.parametrize(
    ("shape", "phase"), [("MlpShape(64, 64, 128)", "forward"), ("StackShape(2, 256, 16, steps=1)", "train")]
)
def test_one_point(tmp_path, shape, phase):
    reason = lab_unavailable()
    if reason:
        pytest.skip(reason)
    code = f"""
import json, sys
import prediction
from flashoverlap.bench.options import Options
from flashoverlap.bench.shapes import MlpShape, StackShape
options = Options({shape}, 2, "100mbit", prediction.MODES, (), {phase!r}, repeats=1, splits="2")
json.dump(prediction.summary(prediction.run(options)), open(sys.argv[1], "w"))
"""
    file = tmp_path / "prediction.json"
    subprocess.run([sys.executable, "-c", code, str(file)], cwd=SCRIPT.parent, check=True, timeout=110)
    result = json.loads(file.read_text())
    assert result.keys() == {"median_error", "worst_error", "auto_vs_best_worst", "points"}
    assert {point["mode"] for point in result["points"]} == set(prediction.MODES)
    assert all(point["predicted_seconds"] > 0 for point in result["points"])
