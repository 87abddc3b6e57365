"""What a run says of itself: all is hidden behind the matmuls where the wire works beside them, nothing where it does not.

The clock is simulated: a row of a matmul takes a second, and so does a piece on the wire. All else is the library's own.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flashoverlap.torch as fo
from flashoverlap.bench.summary import Part, summarize
from flashoverlap.torch.transport import Silent
from flashoverlap.trace import Trace, exposed_seconds

RANKS = 4  # each of which has one row
COMPUTE_S, WIRE_S = RANKS, RANKS - 1
GATHER, SCATTER = "all_gather_linear", "linear_reduce_scatter"


class Clock:
    """In place of the module ``time``."""

    now = 0.0

    def monotonic(self):
        return self.now

    perf_counter = monotonic


class Matmuls(TorchDispatchMode):
    """Takes a second for each row of a matmul."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.mm:
            self.clock.now += len(args[0])
        return func(*args, **(kwargs or {}))


class Transfer:
    """Both halves of an exchange."""

    name, peer = "", 1

    def __init__(self, clock, done_s):
        self.clock, self.posted_s, self.done_s = clock, clock.now, done_s

    @property
    def arrived(self):
        return self.done_s is not None and self.done_s <= self.clock.now

    def wait(self):
        begin_s = self.clock.now
        if self.done_s is None:  # nothing moves but while somebody stands waiting
            self.done_s = begin_s + 1
        self.clock.now = max(begin_s, self.done_s)
        return self.clock.now - begin_s


class Wire(Silent):
    """Rank 0 of some, whose exchanges follow each other: beside the program, while it posts them, or while it waits."""

    def __init__(self, clock, moves):
        super().__init__(0, RANKS)
        self.clock, self.moves, self.free_s, self.spans = clock, moves, 0.0, []

    def expect(self, recv, frm):
        return None

    def post(self, send, to, recv, frm, after=None, expected=None):
        recv.zero_()
        self.free_s = max(self.free_s, self.clock.now) + 1
        ticket = Transfer(self.clock, None if self.moves == "waiting" else self.free_s)
        if self.moves == "posting":
            self.clock.now = self.free_s
        return ticket, ticket


def ran(monkeypatch, op, mode, moves):
    """The trace of one call, and its record."""
    clock = Clock()
    monkeypatch.setattr("flashoverlap.torch.execute.time", clock)
    monkeypatch.setattr("flashoverlap.torch.call.time", clock)
    wire, rows = Wire(clock, moves), 1 if op == GATHER else RANKS
    overlap = fo.Overlap(mode, splits=1) if mode == "flash" else fo.Overlap(mode)
    fo.report().clear()
    with torch.no_grad(), Matmuls(clock):
        getattr(fo, op)(torch.ones(rows, 3), torch.ones(5, 3), group=wire, overlap=overlap)
    (record,) = fo.report()
    fo.report().clear()
    return Trace.of(wire.spans), record


@pytest.mark.parametrize("op", [GATHER, SCATTER])
@pytest.mark.parametrize(
    ("mode", "moves", "hidden_s"),
    [
        ("flash", "beside", WIRE_S),
        ("flash", "posting", 0),
        ("flash", "waiting", 0),
        ("off", "beside", 0),
        ("off", "waiting", 0),
    ],
)
def test_c28_measured_overlap_is_none_where_communication_is_serial(monkeypatch, op, mode, moves, hidden_s):
    trace, record = ran(monkeypatch, op, mode, moves)
    assert trace.compute_s(0) == COMPUTE_S
    assert exposed_seconds(trace) == WIRE_S - hidden_s
    assert record.seconds == COMPUTE_S + WIRE_S - hidden_s
    # a program that posts does not stand waiting for a piece: that it took as long shows in its seconds
    assert record.blocked_s == trace.blocked_s(0) == (0 if moves == "posting" else WIRE_S - hidden_s)
    off, _ = ran(monkeypatch, op, "off", "beside")
    seconds = {"compute": COMPUTE_S, "off": off.makespan_s, mode + " too": record.seconds}
    rows = summarize([[Part(row, seconds=[taken], other_cpu_s=[0.0]) for row, taken in seconds.items()]]).rows
    assert rows[-1].communication_reduction == hidden_s / WIRE_S


def test_c28_half_of_it_is_hidden_where_the_wire_is_half_as_fast_as_it_should_be(monkeypatch):
    """Which tells a share from a switch."""
    post = Wire.post

    def slowly(self, *arguments):
        self.free_s = max(self.free_s, self.clock.now) + 1
        return post(self, *arguments)

    monkeypatch.setattr(Wire, "post", slowly)
    trace, _ = ran(monkeypatch, GATHER, "flash", "beside")
    assert (trace.makespan_s, exposed_seconds(trace)) == (2 * WIRE_S + 1, WIRE_S)  # the last row comes, and is computed
