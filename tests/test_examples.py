"""The examples run as their own words say, and the pictures in the texts are those that the library draws."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashoverlap import build
from flashoverlap.lab import Lab, LabError

ROOT = Path(__file__).parents[1]
MLP = ROOT / "examples" / "tensor_parallel_mlp.py"
SMALL = ("--rows", "37", "--hidden", "24", "--ffn", "18")  # nothing that two or three ranks divide evenly
OPERATORS = ("mlp", "mlp backward", "all_gather_linear", "linear_reduce_scatter backward")


def errors(output):
    """The two errors that the example prints."""
    return [float(error) for error in re.findall(r"by (\S+) at most", output)]


def check(output, mode):
    assert len(errors(output)) == 2
    assert max(errors(output)) < 1e-5
    for operator in OPERATORS:
        assert re.search(rf"tensor_parallel_mlp\.py:\d+ +{operator} +{mode} ", output), output


@pytest.mark.parametrize(("ranks", "mode"), [(2, "flash"), (3, "slice")])
def test_the_mlp_under_torchrun(ranks, mode):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(MLP)]
    run = subprocess.run([*command, *SMALL, "--mode", mode], capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    check(run.stdout, mode)


@pytest.mark.parametrize("link", ["none", "1gbit"])
def test_the_mlp_in_the_lab(link, tmp_path):
    output = tmp_path / "output"
    try:
        lab = Lab(2, link).__enter__()
    except LabError as error:
        pytest.skip(f"no rate-limited links here: {error}")
    with lab, output.open("w") as stdout:
        lab.run([sys.executable, str(MLP), *SMALL], stdout=stdout, prefix=False, timeout_s=100.0)
    check(output.read_text(), "flash")


def test_values_that_differ_fail_the_run(tmp_path):
    broken = tmp_path / "tensor_parallel_mlp.py"
    source = MLP.read_text()
    broken.write_text(source.replace("return fo.mlp(", "return 1.01 * fo.mlp("))
    assert broken.read_text() != source
    with Lab(2, "none") as lab, pytest.raises(LabError) as failure:
        lab.run([sys.executable, str(broken), *SMALL], timeout_s=100.0)
    assert failure.value.exit_code == 1


# --- pictures ---------------------------------------------------------------------------------------------------------

# A picture stands below its recipe: <!-- grid: OP rows=1,1,1,1 pattern=direct splits=1 rank=1 -->. Without a rank it is
# the whole grid.
PICTURE = re.compile(r"<!-- grid: (\S+)([^>]*) -->\n+```text\n(.*?)\n```", re.DOTALL)
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PICTURES = [(text.name, *found) for text in TEXTS for found in PICTURE.findall(text.read_text())]


def drawn(op, options):
    given = dict(word.split("=") for word in options.split())
    rows = [int(count) for count in given["rows"].split(",")]
    schedule = build(op, rows, pattern=given.get("pattern", "direct"), splits=int(given.get("splits", 1)))
    lines = schedule.grid().splitlines()
    if "rank" in given:
        lines = lines[2 * int(given["rank"]) :][:2]
    return "\n".join(line.rstrip() for line in lines)


@pytest.mark.parametrize(("text", "op", "options", "picture"), PICTURES)
def test_a_picture_is_what_grid_draws(text, op, options, picture):
    assert picture == drawn(op, options), f"{text} should show\n{drawn(op, options)}"


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.name)
def test_pictures_are_marked_and_links_lead_somewhere(text):
    words = text.read_text()
    assert words.count("<!-- grid:") == len(PICTURE.findall(words))
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", words):
        assert (text.parent / link).exists(), f"{text.name} points to {link}, which is not there"


def test_the_code_on_schedules_runs(capsys):
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for block in blocks:
        exec(block, {})
    assert len(blocks) == 2
    assert capsys.readouterr().out.startswith("rank 0 net [x0>3 x1<1]")


def test_there_are_pictures():
    assert {"README.md", "how-it-works.md"} <= {text for text, *_ in PICTURES}
