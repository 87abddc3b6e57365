"""Looking at the wire again: when calls have drifted, by all ranks together, and never to and fro."""

import io
import json
import re
import sys
from itertools import pairwise

import pytest
import torch

import flashoverlap.torch as fo
from flashoverlap import Link, Machine
from flashoverlap.drift import Drift, settled, slowed
from flashoverlap.lab import Lab, lab_unavailable
from flashoverlap.matmul import Matmul
from flashoverlap.torch import look
from flashoverlap.torch.transport import transport_of
from flashoverlap.torch.wire import Wire, gathered
from ranks import outcomes, run_ranks

MACHINE = Machine(Link(1e-5, 1e8, ((1000, 2e-5),), 500), matmul=Matmul(1e10))


def entered(drift, *seconds, kind="mlp"):
    """Whether a look is wanted after calls of so many seconds."""
    for each in seconds:
        drift.enter(kind, each)
    return drift.wants_look


# --- when -------------------------------------------------------------------------------------------------------------


def test_calls_that_take_what_they_took_want_no_look():
    assert not entered(Drift(), 9.0, *[1.0] * 50, *[1.2, 0.8] * 20)


@pytest.mark.parametrize("seconds", [1.4, 0.7])
def test_several_calls_in_a_row_want_a_look(seconds):
    drift = Drift()
    assert not entered(drift, *[1.0] * 30, seconds, seconds)
    assert entered(drift, seconds)


def test_one_call_and_calls_to_and_fro_want_none():
    assert not entered(Drift(), *[1.0] * 30, *[9.0, 9.0, 1.0] * 10, *[9.0, 0.1] * 10)


def test_the_first_call_of_a_kind_is_not_the_usual():
    assert not entered(Drift(), 9.0, *[1.0] * 20)


def test_kinds_have_their_own_usual():
    drift = Drift()
    for _ in range(30):
        entered(drift, 1.0)
        entered(drift, 5.0, kind="backward")
    assert not drift.wants_look
    assert entered(drift, *[2.0] * 3)


def test_looks_that_find_nothing_become_rare():
    """Calls that take twice as long every hundred calls, for reasons of their own."""
    drift, looks = Drift(), []
    for call in range(20_000):
        if entered(drift, 1.0 + (call // 100) % 2):
            looks.append(call)
            drift.looked(changed=False)
    gaps = [after - before for before, after in pairwise(looks)]
    assert len(looks) <= 12
    assert gaps[-1] > 4000
    drift.looked(changed=True)  # something new was found: watchful again
    assert entered(drift, *[1.0] * 20, *[3.0] * 3)


def test_what_is_found_is_the_new_usual():
    drift = Drift()
    assert entered(drift, *[1.0] * 30, *[5.0] * 3)
    drift.looked(changed=True)
    assert not entered(drift, *[5.0] * 100)


def test_a_link_that_goes_to_and_fro_is_planned_for_ever_more_rarely():
    """Its rate changes every 40 calls, and every look finds it changed."""
    drift, planned = Drift(), []
    for call in range(20_000):
        if entered(drift, 1.0 + (call // 40) % 2):
            planned.append(call)
            drift.looked(changed=True)
    assert 4 <= len(planned) <= 14
    assert all(after - before >= 16 for before, after in pairwise(planned))
    assert planned[-1] - planned[-2] > 4000
    assert entered(drift, *[1.0] * 5000, *[3.0] * 3)  # one that stays changed is planned for all the same


@pytest.mark.parametrize(
    ("factors", "found"),
    [
        ((4.0, 3.9, 4.2), 4.0),
        ((0.3, 0.25, 0.2), 0.25),
        ((4.0, 1.0, 1.0), 1.0),
        ((4.0, 4.0, 1.2), 1.0),  # on its way back
        ((4.0, 0.2, 4.0), 1.0),
        ((1.2,), 1.0),
    ],
)
def test_what_looks_come_to(factors, found):
    assert settled(factors) == found


def test_few_kinds_are_kept():
    drift = Drift()
    for kind in range(10_000):
        drift.enter(kind, 1.0)
    assert len(drift._kinds) <= 256


# --- what -------------------------------------------------------------------------------------------------------------


def test_a_slower_link_keeps_what_a_transfer_costs_beside_its_bytes():
    machine = slowed(MACHINE, 4.0)
    assert machine.link == Link(1e-5, 2.5e7, ((1000, 5e-5),), 500)
    assert slowed(machine, 0.25).link.sizes[0][1] == pytest.approx(2e-5)
    nodes = Machine(Link(1e-5, 1e8), nodes=(2, 2), uplink=Link(1e-4, 1e7), links=(Link(0.0, 8.0),) * 4)
    changed = slowed(nodes, 2.0, 4.0)
    assert (changed.link.bytes_per_s, changed.uplink, changed.links[3]) == (5e7, Link(1e-4, 2.5e6), Link(0.0, 4.0))


class ScriptedWire(Wire):
    """A wire whose transfers take ``FACTOR`` times what MACHINE says."""

    FACTOR = 1.0

    def arrivals(self, partners, sizes):
        gathered(self._transport, [])
        each_s = MACHINE.transfer_s(sizes[0]) * self.FACTOR
        return [each_s * (place + 1) for place in range(len(sizes))]


def linear(group):
    x = torch.full((8, 16), 1.0 + group.rank(), dtype=torch.float64)
    out = fo.all_gather_linear(x, torch.eye(16, dtype=torch.float64), group=group)
    assert torch.equal(out, torch.cat([torch.full((8, 16), 1.0 + rank) for rank in range(group.size())]).double())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("factor", "found"), [(4.0, True), (0.25, True), (1.2, False)])
def test_all_ranks_look_when_one_wishes_and_plan_with_what_they_find(ranks, factor, found, monkeypatch):
    monkeypatch.setattr(look, "Wire", ScriptedWire)
    monkeypatch.setattr(ScriptedWire, "FACTOR", factor)
    fo.report().clear()

    def run(rank, group):
        fo.use_machine(group, MACHINE)
        transport = transport_of(group)
        linear(group)
        monkeypatch.setattr(transport.drift, "wants_look", rank == 1)
        for _ in range(3):
            linear(group)
        return transport.machine, transport.drift.wants_look

    machines, wishes = zip(*run_ranks(ranks, run), strict=True)
    assert not any(wishes)
    assert len(set(machines)) == 1
    assert machines[0].link.bytes_per_s == pytest.approx(1e8 / factor if found else 1e8)
    notes = fo.report().notes
    assert len(notes) == (ranks if found else 0)
    for note in notes:
        assert f"a transfer takes {factor:.2g} times as long as before; planned anew from this call on" in note
        assert note in str(fo.report())


class MomentaryWire(ScriptedWire):
    """Slow at the first look alone, because of other work."""

    def arrivals(self, partners, sizes):
        self._transport.looks = looks = getattr(self._transport, "looks", 0) + 1
        return [each * (4.0 if looks == 1 else 1.0) for each in super().arrivals(partners, sizes)]


def test_what_only_one_look_finds_changes_nothing(monkeypatch):
    monkeypatch.setattr(look, "Wire", MomentaryWire)
    fo.report().clear()

    def run(rank, group):
        fo.use_machine(group, MACHINE)
        transport_of(group).drift.wants_look = True
        linear(group)
        return transport_of(group).machine, transport_of(group).looks

    assert run_ranks(2, run) == [(MACHINE, 3)] * 2
    assert not fo.report().notes


def test_a_rank_that_fails_at_a_look_takes_the_others_with_it(monkeypatch):
    def failing(transport, *_):
        if transport.rank == 1:
            raise ArithmeticError("blind")
        return gathered(transport, [1.0])

    monkeypatch.setattr(look, "times_as_long", failing)

    def run(rank, group):
        fo.use_machine(group, MACHINE)
        transport_of(group).drift.wants_look = True
        linear(group)

    _, errors = outcomes(3, run)
    assert isinstance(errors[1], ArithmeticError)
    assert all(isinstance(error, fo.PeerError) and "rank 1" in str(error) for error in (errors[0], errors[2]))


# --- on a link that changes -------------------------------------------------------------------------------------------

# Calls an operator until the report has a note, and 20 times more; prints the notes.
PROGRAM = """
import json, sys, time, torch, torch.distributed as dist
import flashoverlap.torch as fo
from flashoverlap import Link, Machine
from flashoverlap.matmul import Matmul
dist.init_process_group("gloo")
group = dist.group.WORLD
fo.use_machine(group, Machine(Link(3e-4, 24e6), matmul=Matmul(5e10)))
x, weight = torch.randn(256, 512), torch.randn(64, 512)
left, end = 20, time.monotonic() + 40
while left and time.monotonic() < end:
    fo.all_gather_linear(x, weight, group=group)
    left -= bool(fo.report().notes)
print(json.dumps([len(fo.report().notes), fo.report().notes]))
dist.destroy_process_group()
"""


def test_a_link_that_changes_is_planned_for_once():
    reason = lab_unavailable()
    if reason:
        pytest.skip(reason)
    with Lab(2, "200mbit,50mbit@6s") as lab:
        result = lab.run([sys.executable, "-c", PROGRAM], stdout=io.StringIO(), timeout_s=90)
    for tail in result.tails:
        count, notes = json.loads(tail.splitlines()[-1])
        assert count == 1, notes
        factor = float(re.search(r"a transfer takes (\S+) times as long as before", notes[0])[1])
        assert 2.5 <= factor <= 6.5
