import copy
import pickle

import pytest
import torch

import flashoverlap.torch as fo
from flashoverlap.choice import Choice, choose
from flashoverlap.overlap import Overlap
from flashoverlap.torch import call
from ranks import run_ranks
from unsharded import MODES, ROW, Problem

REFUSED = [
    (ValueError, "known: auto", {"mode": "fast"}),
    (TypeError, "mode", {"mode": None}),
    (TypeError, "mode", {"mode": 1}),
    (ValueError, "direct, ring", {"pattern": "tree"}),
    (TypeError, "pattern", {"pattern": None}),
    (ValueError, "float32", {"accumulate_dtype": "int8"}),
    (TypeError, "accumulate_dtype", {"accumulate_dtype": torch.float32}),
    (ValueError, "splits=0", {"splits": 0}),
    (ValueError, "splits=-1", {"splits": -1}),
    (TypeError, "splits", {"splits": 2.0}),
    (TypeError, "splits", {"splits": True}),
    (TypeError, "splits", {"splits": "auto"}),
    (ValueError, "slices=0", {"mode": "slice", "slices": 0}),
    (TypeError, "slices", {"mode": "slice", "slices": 1.5}),
    (TypeError, "strict", {"strict": 1}),
    # nothing is accepted and then ignored
    (ValueError, "splits=2 means nothing", {"mode": "off", "splits": 2}),
    (ValueError, "splits=2 means nothing", {"mode": "collective", "splits": 2}),
    (ValueError, "splits=2 means nothing", {"mode": "slice", "splits": 2}),
    (ValueError, "slices=2 means nothing", {"mode": "flash", "slices": 2}),
    (ValueError, "slices=2 means nothing", {"mode": "auto", "slices": 2}),
    (ValueError, "'ring' means nothing", {"mode": "off", "pattern": "ring"}),
    (ValueError, "'ring' means nothing", {"mode": "collective", "pattern": "ring"}),
    (ValueError, "'ring' means nothing", {"mode": "slice", "pattern": "ring"}),
]


@pytest.mark.parametrize(("error", "says", "arguments"), REFUSED, ids=[str(row[2]) for row in REFUSED])
def test_what_is_refused(error, says, arguments):
    with pytest.raises(error, match=says):
        fo.Overlap(**arguments)


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError):
        fo.Overlap(chunks=2)  # pyright: ignore[reportCallIssue]


def test_frozen_and_hashable_and_copied():
    for overlap in MODES:
        assert pickle.loads(pickle.dumps(overlap)) == overlap == copy.deepcopy(overlap)
        assert hash(copy.copy(overlap)) == hash(overlap)
        with pytest.raises(AttributeError):
            overlap.mode = "off"
    assert len({str(overlap) for overlap in MODES}) == len(MODES)


@pytest.mark.parametrize(
    "overlap", [*MODES, fo.Overlap("slice"), fo.Overlap("flash", accumulate_dtype="float64")], ids=str
)
def test_strict_runs_where_the_mode_asked_for_is_taken(overlap):
    strict = fo.Overlap(**{**vars(overlap), "strict": True})
    for n in (1, 2):
        run_ranks(n, lambda rank, group: Problem(ROW, (5, 5), 0).check(rank, group, strict))


def test_strict_is_loud_on_every_rank_where_another_mode_would_be_taken(monkeypatch):
    monkeypatch.setattr(
        call, "choose", lambda overlap, op, rows, **_: Choice("off", "sliced", 1, "too_small", "the rows are too few")
    )

    def main(rank, group):
        problem = Problem(ROW, (5, 5), 0)
        with pytest.raises(RuntimeError, match="'flash' was asked for, strictly, and 'off' would be taken: the rows"):
            problem.run(rank, group, fo.Overlap("flash", strict=True))
        problem.check(rank, group, fo.Overlap("flash"))
        problem.check(rank, group, fo.Overlap("auto", strict=True))  # which leaves the mode open

    run_ranks(2, main)


def test_strict_on_one_rank_only_is_loud_on_both():
    def main(rank, group):
        with pytest.raises(ValueError, match="disagree"):
            Problem(ROW, (5, 5), 0).run(rank, group, fo.Overlap("flash", strict=rank == 0))

    run_ranks(2, main)


def test_no_piece_is_cut_into_more_parts_than_it_has_rows():
    choice = choose(Overlap("flash", splits=10**9), "mlp", [3, 2])
    assert (choice.splits, choice.reason) == (3, "3 splits, one a row, where 1000000000 were asked for")
    assert choose(Overlap("slice", slices=9), "mlp", [0, 0]).splits == 1
    assert choose(Overlap("flash", splits=2), "mlp", [3, 2]).reason == "2 splits, as asked"
