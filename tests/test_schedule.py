"""Schedules as text, as grids and as values."""

import copy
import pickle
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashoverlap.all_to_all import all_to_all
from flashoverlap.flow import FLOWS
from flashoverlap.patterns import PATTERNS, build
from flashoverlap.schedule import Collective, Compute, Exchange, Schedule, ScheduleError, Size

TEXT = """
schedule all_gather_matmul ranks=2
size x0=2x4 x1=3x4 y0=2x8 y1=3x8
rank 0: xchg x0>1 x1<1 | y0=mm(x0) | y1=mm(x1)
rank 1: xchg x1>0 x0<0 | y1=mm(x1) | y0=mm(x0)
""".strip()


@st.composite
def schedules(draw):
    pattern = draw(st.sampled_from(PATTERNS))
    splits = 1 if pattern == "collective" else draw(st.integers(1, 3))
    n = draw(st.integers(1, 5))
    rows = st.lists(st.integers(0, 9), min_size=n, max_size=n)
    op = draw(st.sampled_from([*FLOWS, "all_to_all"]))
    if op == "all_to_all":
        return all_to_all(draw(st.lists(rows, min_size=n, max_size=n)), pattern=pattern, splits=splits)
    widths = draw(st.dictionaries(st.sampled_from("xhpzgw"), st.integers(1, 64)))
    return build(op, draw(rows), pattern=pattern, splits=splits, row_bytes=widths)


@settings(max_examples=80, deadline=None)
@given(schedules())
def test_text_is_read_back(schedule):
    assert Schedule.parse(str(schedule)) == schedule


def test_text():
    schedule = Schedule.parse(TEXT)
    assert schedule == build("all_gather_matmul", [2, 3], row_bytes={"x": 4, "y": 8})
    assert str(schedule) == TEXT
    assert schedule.programs[0] == (
        Exchange("x0", 1, "x1", 1),
        Compute("mm", ("x0",), ("y0",)),
        Compute("mm", ("x1",), ("y1",)),
    )


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("z0=z0+p0@1", Compute("", (), ("z0",), ("z0", "p0@1"))),
        ("z0=p0", Compute("", (), ("z0",), ("p0",))),
        ("z0.1=down(h0.1)+p0.1@3", Compute("down", ("h0.1",), ("z0.1",), ("p0.1@3",))),
        ("w=wgrad()", Compute("wgrad", (), ("w",))),
        ("p0_1.0,p0_2.0=mm(a0_1.0,a0_2.0)", Compute("mm", ("a0_1.0", "a0_2.0"), ("p0_1.0", "p0_2.0"))),
        ("xchg p1.2>1 p0.2@11<11", Exchange("p1.2", 1, "p0.2@11", 11)),
        ("all_gather x0 -> x0 x1", Collective("all_gather", ("x0",), ("x0", "x1"))),
    ],
)
def test_every_form_of_operation(text, op):
    assert str(op) == text
    assert Schedule.parse(f"schedule any ranks=1\nrank 0: {text}").programs == ((op,),)


GATHER = """
rank 0 net [x0>3 x1<1][x0>2 x2<2][x0>1 x3<3]
       mm  [y0=mm(x0)][y1=mm(x1)][y2=mm(x2)][y3=mm(x3)]
rank 1 net [x1>0 x2<2][x1>3 x3<3][x1>2 x0<0]
       mm  [y1=mm(x1)][y2=mm(x2)][y3=mm(x3)][y0=mm(x0)]
rank 2 net [x2>1 x3<3][x2>0 x0<0][x2>3 x1<1]
       mm  [y2=mm(x2)][y3=mm(x3)][y0=mm(x0)][y1=mm(x1)]
rank 3 net [x3>2 x0<0][x3>1 x1<1][x3>0 x2<2]
       mm  [y3=mm(x3)][y0=mm(x0)][y1=mm(x1)][y2=mm(x2)]
"""
SCATTER = """
rank 1 net            [p2>2 p1@0<0][p3>3 p1@3<3][p0>0 p1@2<2]
       mm  [p2=mm(h2)][p3=mm(h3)  ][p0=mm(h0)  ][z1=mm(h1)  ][z1=z1+p1@0+p1@3+p1@2]
"""
MLP = """
rank 1 net [x1>0 x2<2][x1>3 x3<3][x1>2 x0<0  ][p2>2 p1@0<0]             [p3>3 p1@3<3]             [p0>0 p1@2<2]
       mm  [h1=up(x1)][h2=up(x2)][p2=down(h2)][h3=up(x3)  ][p3=down(h3)][h0=up(x0)  ][p0=down(h0)][z1=down(h1)][z1=z1+p1@0+p1@3+p1@2]
"""


def test_grid_of_the_gather_side():
    assert build("all_gather_matmul", [1] * 4).grid() == GATHER.strip()


@pytest.mark.parametrize(("op", "drawn"), [("matmul_reduce_scatter", SCATTER), ("mlp", MLP)])
def test_grid_of_rank_1_of_4(op, drawn):
    assert build(op, [1] * 4).grid().splitlines()[2:4] == drawn.strip().splitlines()


def test_grid_of_a_collective_and_of_nothing():
    assert build("all_gather_matmul", [1, 1], pattern="collective").grid().splitlines()[:2] == [
        "rank 0 net [all_gather x0 -> x0 x1]",
        "       mm                          [y0,y1=mm(x0,x1)]",
    ]
    assert Schedule("none", ((), ()), ()).grid() == "rank 0 net\n       mm\nrank 1 net\n       mm"


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("", "not with ''"),
        ("programme x ranks=1", "not with 'programme x ranks=1'"),
        ("schedule x ranks=2\nrank 0: y0=mm(x0)", "2 ranks are announced and 1 programs follow"),
        ("schedule x ranks=1\nsize x0=3\nrank 0: y0=mm(x0)", "not 'x0=3'"),
        ("schedule x ranks=1\nrank 1: y0=mm(x0)", "'rank 0:', not with 'rank 1: y0=mm(x0)'"),
        ("schedule x ranks=1\nrank 0: y0=mm(x0) | xchg x0 x1", "rank 0: cannot read 'xchg x0 x1'"),
        ("schedule x ranks=1\nrank 0: y0=mm(x0", "rank 0: cannot read 'y0=mm(x0'"),
        ("schedule x ranks=1\nrank 0: gather x0 -> x0", "rank 0: cannot read 'gather x0 -> x0'"),
    ],
)
def test_unreadable_text_is_quoted(text, quoted):
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(text)
    assert quoted in str(caught.value)


def test_an_error_marks_the_place():
    schedule = Schedule.parse(TEXT)
    error = ScheduleError("this one", schedule, 1, 1)
    assert (error.rank, error.index) == (1, 1)
    assert str(error).splitlines() == [
        "this one",
        "  rank 0: xchg x0>1 x1<1 | y0=mm(x0) | y1=mm(x1)",
        "> rank 1: xchg x1>0 x0<0 | >>y1=mm(x1)<< | y0=mm(x0)",
    ]
    assert str(ScheduleError("", schedule, 0, 3)).splitlines()[1].endswith("y1=mm(x1) | >>end<<")


def test_an_error_in_a_long_program_shows_its_surroundings():
    lines = str(ScheduleError("", build("all_gather_matmul", [1] * 9), 4, 12)).splitlines()
    assert lines[1:] == [
        "> rank 4: ... | y4=mm(x4) | y5=mm(x5) | y6=mm(x6) | y7=mm(x7) | >>y8=mm(x8)<< | y0=mm(x0) | y1=mm(x1) | y2=mm(x2) | y3=mm(x3)"
    ]


def test_sizes():
    schedule = Schedule("any", ((Exchange("p1", 1, "p0@1", 1),), ()), (("p0", Size(0, 4)), ("p1", Size(3, 4))))
    assert (schedule.size("p1").bytes, schedule.size("p1@0").bytes, schedule.size("p0@1")) == (12, 12, Size(0, 4))
    assert [schedule.wire_bytes(rank) for rank in range(2)] == [12, 0]
    with pytest.raises(ScheduleError, match="buffer 'q' of any has no size"):
        schedule.size("q")


def test_frozen_hashable_and_copied_without_caches():
    schedule = build("mlp", [2, 3], splits=2)
    schedule.size("x0.0")  # fills a cache
    with pytest.raises(FrozenInstanceError):
        schedule.op = "other"  # pyright: ignore
    for other in (pickle.loads(pickle.dumps(schedule)), copy.deepcopy(schedule), copy.copy(schedule)):
        assert other == schedule
        assert hash(other) == hash(schedule)
        assert other.size("x0.0") == schedule.size("x0.0")
    assert len({schedule, Schedule.parse(str(schedule)), build("mlp", [3, 2], splits=2)}) == 2
