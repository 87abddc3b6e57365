"""Reductions that are left open: their programs, and the order of events when a run is paused."""

import pytest
import torch

from flashoverlap import build, verify
from flashoverlap.schedule import Compute
from flashoverlap.torch.execute import Run
from flashoverlap.torch.transport import DONE, Silent


def test_all_kernels_come_before_the_first_wait():
    schedule = build("grad_reduce_scatter", [2, 2, 1])
    assert str(schedule).splitlines()[2:] == [
        "rank 0: p1=wgrad(h1) | xchg p1>1 p0@2<2 | p2=wgrad(h2) | xchg p2>2 p0@1<1 | z0=wgrad(h0) | z0=z0+p0@1+p0@2",
        "rank 1: p2=wgrad(h2) | xchg p2>2 p1@0<0 | p0=wgrad(h0) | xchg p0>0 p1@2<2 | z1=wgrad(h1) | z1=p1@0+z1+p1@2",
        "rank 2: p0=wgrad(h0) | xchg p0>0 p2@1<1 | p1=wgrad(h1) | xchg p1>1 p2@0<0 | z2=wgrad(h2) | z2=p2@0+p2@1+z2",
    ]


def test_a_ring_hands_on_after_the_kernels():
    schedule = build("grad_reduce_scatter", [1, 1, 1], pattern="ring")
    assert str(schedule.programs[1][3]) == "z1=wgrad(h1)"
    assert [str(op) for op in schedule.programs[1][4:]] == ["p2=p2+p2@0", "xchg p2>2 p1@0<0", "z1=p1@0+z1"]


@pytest.mark.parametrize("op", ["grad_reduce_scatter", "param_all_gather"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("pattern", ["direct", "ring", "sliced", "collective"])
def test_every_pattern_is_proved(op, ranks, pattern):
    for splits in (1,) if pattern == "collective" else (1, 2, 3):
        verify(build(op, [3 + rank % 2 for rank in range(ranks)], pattern=pattern, splits=splits))


class Held:
    """The ticket of a transfer that the test completes."""

    name, posted_s, done_s, peer = "", 0.0, 0.0, None

    def __init__(self):
        self.arrived = False

    def wait(self):
        self.arrived = True
        return 1.0


class Slow(Silent):
    """Nothing arrives until it is waited for."""

    def __init__(self, events):
        super().__init__(1, 3)
        self.events, self.tickets = events, []

    def post(self, send, to, recv, frm, after=None, expected=None):
        self.events.append(f"post to {to}")
        self.tickets.append(Held())
        return DONE, self.tickets[-1]


def test_a_run_stands_still_where_it_would_wait():
    events = []
    transport = Slow(events)
    kernels = {name: lambda op: events.append(str(op)) for name in ("wgrad", "")}
    run = Run(build("grad_reduce_scatter", [1, 1, 1]), transport, lambda name: torch.zeros(1), kernels)
    run.advance()
    assert events == ["p2=wgrad(h2)", "post to 2", "p0=wgrad(h0)", "post to 0", "z1=wgrad(h1)"]
    assert not run.arrived
    assert not run.through
    for ticket in transport.tickets:
        ticket.arrived = True
    assert run.arrived
    run.advance()
    assert events[5:] == ["z1=p1@0+z1+p1@2"]
    assert run.through
    assert run.finish().sent_bytes == 8


def test_a_gather_is_posted_before_anything_is_computed():
    events = []
    kernels = {"mm": lambda op: events.append(str(op))}
    run = Run(build("param_all_gather", [1, 1, 1]), Slow(events), lambda name: torch.zeros(1), kernels)
    run.post()
    assert events == ["post to 0", "post to 2"]
    run.advance()
    assert events[2:] == ["y1=mm(x1)"]
    run.finish()
    assert [event for event in events if "mm" in event] == ["y1=mm(x1)", "y2=mm(x2)", "y0=mm(x0)"]
    assert all(isinstance(op, Compute) for op in run._program[2:])
