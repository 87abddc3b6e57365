"""Which file may know which, what is public, and habits that a file can be held to without running it."""

import ast
import importlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import flashoverlap

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "flashoverlap"

# The level of every file, once. A folder's name stands for all files in it, unless a file of it is named itself. Imports
# go down; inside one level they stay in one folder (or between a folder and those in it) and make no circle.
LEVELS = {
    0: "schedule flow matmul rounds pieces machine drift trace overlap spec costs architectures step_spec uncollected",  # pure Python, no torch
    1: "patterns all_to_all deferred verify simulate simulated_rank standstill alike uplinks bursts workload wire_bound report lab machine_file checkpoint_folder step",
    2: "candidate cut plan choice step_plan cluster __init__",
    3: "torch",  # transports, execution, pieces: all of torch/ that is not named below
    4: "torch/functional torch/attention",
    5: "torch/modules torch/plans torch/parallelize torch/data_parallel torch/__init__ arguments live_bytes",
    6: "integrations bench train generate",
    7: "cli __main__",
}
LEVEL = {name: level for level, names in LEVELS.items() for name in names.split()}
# folders and files; torch/machine_cache: the user's cache is where XDG_CACHE_HOME says, and a first call has no argument
MAY_READ_ENVIRONMENT = {"lab", "bench", "train", "generate", "cli", "arguments", "torch/machine_cache"}

PUBLIC = {
    "flashoverlap": """
        Collective Compute Exchange Kernel Link Machine Matmul Overlap Plan Schedule ScheduleError Trace __version__
        all_gather_matmul all_reduce all_to_all build matmul_reduce_scatter mlp plan simulate verify""",
    "flashoverlap.torch": """
        CausalLM ColumnParallel FusedMLP Overlap ParallelAttention PeerError Replicated RowParallel
        SequenceParallel ShardedInput UlyssesAttention VocabParallelEmbedding VocabParallelHead all_gather
        all_gather_linear all_reduce all_reduce_grad_linear all_to_all_linear attention_all_to_all_linear
        attention_reduce_scatter calibrate data_parallel full_state_dict linear_all_reduce linear_all_to_all
        linear_reduce_scatter mlp parallelize reduce_scatter report split sum_gradient use_machine
        vocab_parallel_cross_entropy""",
}


def name_of(path):
    return path.relative_to(SOURCE).with_suffix("").as_posix()


FILES = {name_of(path): path for path in sorted(SOURCE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(), feature_version=(3, 10)) for name, path in FILES.items()}
OTHERS = [path for folder in ("tests", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
each_file = pytest.mark.parametrize("name", FILES)


def level_of(name):
    """The level of the file itself or of the nearest folder that has one."""
    known = name
    while known and known not in LEVEL:
        known = folder_of(known)
    assert known, f"give {name} a level in LEVELS"
    return LEVEL[known]


def folder_of(name):
    return name.rpartition("/")[0]


def imports(name, *, late=True):
    """Files of the package that a file imports; ``late``: those imported inside functions too."""
    nodes = ast.walk(TREES[name]) if late else top_level(TREES[name])
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            if node.level:
                above = name.split("/")[: -node.level]
                base = [*above, *module]
            elif module[:1] == ["flashoverlap"]:
                base = module[1:]
            else:
                continue
            found |= {target("/".join([*base, alias.name])) or target("/".join(base)) for alias in node.names}
        elif isinstance(node, ast.Import):
            modules = [alias.name.split(".") for alias in node.names]
            found |= {target("/".join(module[1:])) for module in modules if module[0] == "flashoverlap"}
    assert None not in found, f"{name} imports something that is not there"
    return found - {name}


def top_level(tree):
    """All nodes but those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from top_level(node)


def target(name):
    """The file that a dotted name, written with slashes, stands for; None where it is no file's."""
    return next((file for file in (name, f"{name}/__init__".lstrip("/")) if file in FILES), None)


def test_every_file_has_a_level():
    assert set(map(level_of, FILES)) <= set(LEVELS)
    with pytest.raises(AssertionError, match="give utils a level in LEVELS"):
        level_of("utils")


@each_file
def test_imports_go_down(name):
    for other in imports(name):
        levels = f"{name} (level {level_of(name)}) imports {other} (level {level_of(other)})"
        assert level_of(other) <= level_of(name), levels
        if level_of(other) == level_of(name):
            inner, outer = sorted((folder_of(name), folder_of(other)), key=len, reverse=True)
            assert f"{inner}/".startswith(f"{outer}/".lstrip("/")), f"{levels}, in another folder"


def test_imports_at_the_top_of_files_make_no_circle():
    left = {name: imports(name, late=False) for name in FILES}
    while left:
        free = [name for name, needs in left.items() if not needs & left.keys()]
        assert free, f"these import each other: {left}"
        left = {name: needs for name, needs in left.items() if name not in free}


def test_a_circle_and_a_climb_would_be_seen(monkeypatch):
    monkeypatch.setitem(TREES, "schedule", ast.parse("from .verify import verify"))
    with pytest.raises(AssertionError, match=r"schedule \(level 0\) imports verify \(level 1\)"):
        test_imports_go_down("schedule")
    with pytest.raises(AssertionError, match="these import each other"):
        test_imports_at_the_top_of_files_make_no_circle()
    monkeypatch.setitem(TREES, "flow", ast.parse("def f():\n    import flashoverlap.torch.functional.mlp"))
    assert imports("flow") == {"torch/functional/mlp"}
    assert imports("flow", late=False) == set()


def test_what_pure_python_may_load():
    """Levels 0 to 2 know nothing of torch, the network or the terminal, wherever the import stands."""
    for name in FILES:
        if level_of(name) <= 2:
            for node in ast.walk(TREES[name]):
                modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                loaded = {module.partition(".")[0] for module in modules}
                barred = {"torch", "rich", "typer"} | (set() if name.startswith("lab/") else {"pyroute2"})
                assert not loaded & barred, f"{name} imports {loaded & barred}"


def test_import_flashoverlap_loads_no_torch():
    code = "import sys, flashoverlap; print(*{'torch', 'pyroute2', 'rich', 'typer'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names(module):
    loaded = importlib.import_module(module)
    assert sorted(loaded.__all__) == sorted(PUBLIC[module].split())
    for name in loaded.__all__:
        assert hasattr(loaded, name)


def test_the_version_is_that_of_the_package():
    assert flashoverlap.__version__ == version("flashoverlap")


@each_file
def test_a_file_says_what_it_is_and_is_short(name):
    assert ast.get_docstring(TREES[name]), f"{name} begins with no sentence that says what it is"
    lines = len(FILES[name].read_text().splitlines())
    assert lines <= 400, f"{name} has {lines} lines; 400 is the most: split it"


@each_file
def test_no_global_and_no_environment(name):
    for node in ast.walk(TREES[name]):
        assert not isinstance(node, ast.Global), f"{name}:{node.lineno} uses global"
        reads = (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")) or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {alias.name for alias in node.names} & {"environ", "getenv", "environb"}
        )
        if MAY_READ_ENVIRONMENT.isdisjoint({name, name.split("/")[0]}):
            assert not reads, f"{name}:{node.lineno} reads the environment; an argument serves better"


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_3_10_can_read_it(path):
    ast.parse(path.read_text(), feature_version=(3, 10))
