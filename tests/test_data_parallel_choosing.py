"""What mode a data-parallel model's steps take, and what the report says that they take; ranks are threads."""

import pytest
import torch
from torch import nn

import flashoverlap.torch as fo
from flashoverlap import Link, Machine, Matmul, Overlap, choice
from flashoverlap.torch import look
from flashoverlap.torch.data_parallel import apply
from flashoverlap.torch.data_parallel.channels import Channels
from flashoverlap.torch.transport import transport_of
from flashoverlap.torch.wire import Wire, gathered
from ranks import outcomes, run_ranks

WIDTH = 24
SLOW = Machine(Link(1e-6, 1e6), matmul=Matmul(1e7))  # a matmul of 8 tokens takes a millisecond, and so does its weight
EVEN = Machine(Link(1e-6, 4e6), matmul=Matmul(1e7))
FAST = Machine(Link(0.0, 1e12), matmul=Matmul(1e7))
RECORDS = ("grad_reduce_scatter", "grad_all_gather", "step")


@pytest.fixture(autouse=True)
def _no_records():
    fo.report().clear()
    yield
    fo.report().clear()


def stack(width=WIDTH):
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3))).double()


def steps(model, rank, count=3, tokens=8):
    """Gradients of each of some steps."""
    found = []
    for step in range(count):
        model.zero_grad()
        x = torch.arange(tokens * WIDTH, dtype=torch.float64).view(tokens, WIDTH).sin() * (rank + 1 + step)
        model(x).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    return found


def modes(records):
    """By operator what was taken, in the order of the report."""
    return {op: [(r.mode_taken, r.reason_code) for r in records if r.op == op] for op in RECORDS}


def run(machine, overlap=Overlap(), ranks=2, tokens=lambda rank: 8, make=stack, small_bytes=0):
    """Three steps of every rank; gradients of rank 0, the engines, and the records of all ranks together."""

    starts = [make() for _ in range(ranks)]  # threads share torch's generator

    def one(rank, group):
        fo.use_machine(group, machine)
        model = apply(starts[rank], None, group, overlap=overlap, small_bytes=small_bytes)
        return steps(model, rank, tokens=tokens(rank)), model._engine

    found = run_ranks(ranks, one)
    return found[0][0], [engine for _, engine in found], fo.report().records


@pytest.mark.parametrize(("machine", "mode", "code"), [(SLOW, "flash", "planned"), (FAST, "off", "plain")])
def test_the_second_step_takes_what_a_plan_says(machine, mode, code):
    _, engines, records = run(machine)
    assert {engine.account.mode for engine in engines} == {mode}
    assert modes(records) == {
        "grad_reduce_scatter": [("flash", "rule_of_thumb"), (mode, code)],
        "grad_all_gather": [("flash", "rule_of_thumb"), (mode, code)],
        "step": [(mode, code)],
    }
    (step,) = (record for record in records if record.op == "step")
    assert step.calls == 2 * 2  # of two ranks
    assert step.seconds > 0
    assert step.reason.startswith("forward, backward and exchanges as a whole: a step's linears")
    assert 0 < step.predicted_exposed_s < step.predicted_s
    assert "as a whole" in str(fo.report())


@pytest.mark.parametrize("mode", ["flash", "slice", "off", "collective"])
def test_a_mode_that_was_asked_for_is_kept_and_predicted(mode):
    _, engines, records = run(SLOW, Overlap(mode))
    assert {engine.account.mode for engine in engines} == {mode}
    assert modes(records)["step"] == [(mode, "asked")]
    assert all(record.predicted_s is None for record in records if record.op != "step")
    unplanned = run(None, Overlap(mode))[2]
    assert modes(unplanned)["step"] == [(mode, "asked")]  # those of before: no more have come
    assert sum(record.calls for record in unplanned if record.op == "step") == 4


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("machine", [SLOW, FAST])
def test_gradients_are_those_of_the_mode_that_is_taken(ranks, machine):
    """Bit by bit: of flash at first, and of what the plan says from then on."""
    planned, engines, _ = run(machine, ranks=ranks)
    parts = engines[0].units[0].parts
    asked = {mode: run(None, Overlap(mode), ranks=ranks)[0] for mode in ("flash", engines[0].account.mode)}
    for step, mode in enumerate(("flash", engines[0].account.mode, engines[0].account.mode)):
        assert all(map(torch.equal, planned[step], asked[mode][step])), (step, mode, len(parts))


def test_the_rank_with_most_tokens_sets_it():
    """For one token a matmul is far too short to hide anything; 512 of another rank are worth it."""
    machine = Machine(Link(1e-6, 1e6), matmul=Matmul(1e8))
    alone = run(machine, tokens=lambda rank: 1)[1]
    assert {engine.account.mode for engine in alone} == {"off"}
    for order in ((1, 512), (512, 1)):
        _, engines, _ = run(machine, tokens=lambda rank, order=order: order[rank])
        assert {engine.account.mode for engine in engines} == {"flash"}


def test_splits_are_planned_and_the_same_on_every_rank():
    _, engines, records = run(EVEN)
    units = [[len(unit.parts) for unit in engine.units] for engine in engines]
    assert units[0] == units[1]
    assert units[0][0] > 1
    (step,) = (record for record in records if record.op == "step")
    assert step.detail == f"direct x{units[0][0]}"
    _, engines, _ = run(EVEN, Overlap(splits=3))
    assert [len(unit.parts) for unit in engines[0].units] == [3, 3, 3]


def test_without_a_machine_it_is_flash_by_rule_of_thumb_or_off_where_there_is_little(monkeypatch):
    _, engines, records = run(None)
    assert {engine.account.mode for engine in engines} == {"flash"}
    assert modes(records)["grad_reduce_scatter"] == [("flash", "rule_of_thumb")]
    fo.report().clear()
    monkeypatch.setattr(choice, "WORTH_BYTES", 1 << 20)
    _, engines, records = run(None)
    assert {engine.account.mode for engine in engines} == {"off"}
    assert modes(records)["grad_reduce_scatter"] == [("flash", "rule_of_thumb"), ("off", "small")]
    assert modes(records)["step"] == []
    assert f"{3 * WIDTH * WIDTH * 8} bytes are too few" in records[-1].reason


def test_a_ring_and_a_model_of_other_layers_are_left_to_the_rule_of_thumb():
    def mixed():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(WIDTH, 2, bias=False), nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 99, 2)).double()

    for machine, overlap, make in ((FAST, Overlap(pattern="ring"), stack), (FAST, Overlap(), mixed)):
        _, engines, records = run(machine, overlap, make=make)
        assert {engine.account.mode for engine in engines} == {"flash"}
        assert {record.reason_code for record in records} == {"rule_of_thumb"}


def test_buckets_are_planned_with_what_hides_them():
    """A bias beside each linear: buckets move, and no kernel of the plan computes with them."""

    def biased():
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).double()

    _, engines, records = run(SLOW, make=biased, small_bytes=WIDTH * WIDTH * 8)
    assert [unit.linear for unit in engines[0].units] == [True, True, True, False]
    assert modes(records)["step"] == [("flash", "planned")]


def told(machines, look):
    """What each of two ranks sees of its engine after a step with each machine."""

    def one(rank, group):
        model = apply(starts[rank], None, group, small_bytes=0)
        found = []
        for machine in machines:
            fo.use_machine(group, machine)
            steps(model, rank, 1)
            found.append(look(model._engine))
        return found

    starts = [stack() for _ in range(2)]
    return run_ranks(2, one)


def test_another_machine_is_planned_for_anew():
    """After a calibration, say: the step that follows is the last of the old plan."""
    modes_of = told((None, SLOW, SLOW, FAST, None, SLOW), lambda engine: engine.account.mode)
    assert modes_of == [["flash", "flash", "flash", "off", "off", "flash"]] * 2
    asked = {code for _, code in modes(fo.report().records)["step"]}
    assert asked == {"planned", "plain"}


def test_nothing_is_predicted_without_a_machine():
    predicted = told((SLOW, SLOW, None, None, SLOW, SLOW), lambda engine: engine.account._predicted is not None)
    assert predicted == [[True, True, False, False, True, True]] * 2


@pytest.mark.parametrize("machine", [None, FAST])
def test_a_model_of_which_most_is_frozen_is_left_to_the_rule_of_thumb(machine, monkeypatch):
    """What is frozen travels all the same where parameters are sharded, and no plan knows of it."""
    monkeypatch.setattr(choice, "WORTH_BYTES", 1 << 20)

    def adapted():
        model = stack()
        for linear in model[1:]:
            linear.weight.requires_grad_(False)
        return model

    starts = [adapted() for _ in range(2)]

    def one(rank, group):
        fo.use_machine(group, machine)
        model = apply(starts[rank], None, group, small_bytes=0)
        model._engine.gradients.choosing._shard = "parameters"  # which would need a mesh
        for _ in range(2):
            model(torch.ones(4, WIDTH, dtype=torch.float64)).sum().backward()
        return model._engine.account.mode, model._engine.account._predicted

    assert run_ranks(2, one) == [("flash", None)] * 2


def test_what_overlaps_nothing_is_not_cut_and_cut_again_when_it_does():
    def one(rank, group):
        model = apply(starts[rank], None, group, overlap=Overlap(), small_bytes=0)
        first = [len(unit.parts) for unit in model._engine.units]
        found = []
        for machine in (FAST, SLOW):
            fo.use_machine(group, machine)
            steps(model, rank, 1)
            found.append([len(unit.parts) for unit in model._engine.units])
        return first, *found

    starts = [stack() for _ in range(4)]
    first, off, flash = run_ranks(4, one)[0]
    assert min(first) > 1
    assert off == [1, 1, 1]
    assert flash[1:] == first[1:]


def test_forwards_in_eval_mode_belong_to_no_step():
    def one(rank, group):
        fo.use_machine(group, SLOW)
        model = apply(starts[rank], None, group, small_bytes=0)
        model.eval()(torch.ones(4, WIDTH, dtype=torch.float64))
        return model._engine.account._seconds

    starts = [stack() for _ in range(2)]
    assert run_ranks(2, one) == [0.0, 0.0]


def test_steps_that_only_accumulate_are_not_timed():
    def one(rank, group):
        fo.use_machine(group, SLOW)
        model = apply(stack(), None, group, small_bytes=0)
        steps(model, rank, 1)
        with model.no_sync():
            model(torch.ones(4, WIDTH, dtype=torch.float64)).sum().backward()
        assert model._engine.account._seconds == 0.0
        steps(model, rank, 1)
        return model._engine.account._seconds

    assert run_ranks(2, one) == [0.0, 0.0]


def test_a_rank_that_cannot_plan_ends_the_step_of_all(monkeypatch):
    def one(rank, group):
        fo.use_machine(group, SLOW)
        model = apply(stack(), None, group, small_bytes=0)
        if rank == 0:
            monkeypatch.setattr(model._engine.gradients.choosing, "_plan", lambda *_: 1 / 0)
        steps(model, rank)

    _, errors = outcomes(2, one, timeout_s=10.0)
    assert isinstance(errors[0], ZeroDivisionError)
    assert isinstance(errors[1], fo.PeerError)


def test_a_machine_is_measured_where_a_model_is_worth_it(monkeypatch):
    """Once, by all ranks, and not where a mode was asked for."""
    measured = []

    def at_first_use(transport, dtype, device, nbytes, tell):
        measured.append((transport.rank, dtype, nbytes))
        transport.use(FAST)

    monkeypatch.setitem(Channels.measured.__globals__, "at_first_use", at_first_use)

    def one(rank, group):
        for overlap in (Overlap("flash"), Overlap()):
            steps(apply(stack(), None, group, overlap=overlap, small_bytes=0), rank)
        return transport_of(group).machine

    assert run_ranks(2, one) == [FAST, FAST]
    assert sorted(measured, key=lambda each: each[0]) == [
        (rank, torch.float64, 3 * WIDTH * WIDTH * 8) for rank in (0, 1)
    ]


# --- steps that are watched -------------------------------------------------------------------------------------------

WIDE = Machine(Link(1e-6, 1e9), matmul=Matmul(1e7))  # nothing is worth overlapping


class SlowWire(Wire):
    """A wire whose transfers take what SLOW says."""

    def arrivals(self, partners, sizes):
        gathered(self._transport, [])
        return [SLOW.transfer_s(sizes[0]) * (place + 1) for place in range(len(sizes))]


def watched(group, seconds):
    """The kinds of all steps that are entered from now on; the next ones take so many ``seconds``, and then 1."""
    drift, kinds = transport_of(group).drift, []
    enter, script = drift.enter, iter(seconds)

    def entered(kind, _):
        kinds.append(kind)
        enter(kind, next(script, 1.0))

    drift.enter = entered
    return kinds


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_wire_that_has_changed_is_planned_for_by_all_ranks(ranks, monkeypatch):
    """One of them has seen its steps drift: after the first, which no plan has set, and four that show the usual."""
    monkeypatch.setattr(look, "Wire", SlowWire)
    starts = [stack() for _ in range(ranks)]

    def one(rank, group):
        fo.use_machine(group, WIDE)
        watched(group, [1.0] * 4 + [3.0 if rank == 1 else 1.0] * 3)
        model, found = apply(starts[rank], None, group, small_bytes=0), []
        for _ in range(12):
            steps(model, rank, 1)
            found.append((model._engine.account.mode, transport_of(group).machine))
        return found

    found = run_ranks(ranks, one)
    assert all(theirs == found[0] for theirs in found)
    taken, machines = zip(*found[0], strict=True)
    assert taken == ("off",) * 8 + ("flash",) * 4  # told at the end of the ninth
    assert machines[:8] == (WIDE,) * 8
    assert len(set(machines[8:])) == 1
    assert machines[8].link.bytes_per_s == pytest.approx(1e6, rel=0.01)
    said = "a transfer takes 1e+03 times as long as before; planned anew from the next step on"
    assert fo.report().notes == (f"data_parallel, Sequential: {said}",) * ranks
    assert modes(fo.report().records)["step"] == [("off", "plain"), ("flash", "planned")]


def test_steps_of_other_sizes_are_of_another_kind():
    def one(rank, group):
        fo.use_machine(group, WIDE)
        model = apply(stack(), None, group, small_bytes=0)
        kinds = watched(group, ())
        steps(model, rank)  # the first of them is not entered
        steps(model, rank, 1, tokens=16)
        x = torch.ones(8, WIDTH, dtype=torch.float64)
        (model(x) + model(x)).sum().backward()
        with model.no_sync():
            for _ in range(2):
                model(x).sum().backward()
        model(x).sum().backward()
        model[0].weight.requires_grad_(False)
        model(x).sum().backward()
        model[0].weight.requires_grad_(True)
        steps(model, rank, 2)
        return [kinds.index(kind) for kind in kinds]

    # after two that are alike: other tokens, two forwards, three micro-batches, less that moves; as at first
    assert run_ranks(2, one) == [[0, 0, 2, 3, 4, 5, 0, 0]] * 2


@pytest.mark.parametrize("overlap", [Overlap("flash"), Overlap("off"), Overlap(pattern="ring")])
def test_what_no_plan_may_change_is_not_watched(overlap):
    def one(rank, group):
        fo.use_machine(group, WIDE)
        kinds, drift = watched(group, ()), transport_of(group).drift
        drift.wants_look = True  # operators have drifted
        steps(apply(stack(), None, group, overlap=overlap, small_bytes=0), rank)
        return kinds, drift.wants_look

    assert run_ranks(2, one) == [([], True)] * 2


@pytest.mark.parametrize("overlap", [Overlap(), Overlap("flash")])
def test_being_watched_costs_no_message(overlap):
    def one(rank, group):
        fo.use_machine(group, SLOW)
        model = apply(stack(), None, group, overlap=overlap, small_bytes=0)
        steps(model, rank, 2)
        transports = transport_of(group), model._engine.channels.reduce
        before = [transport.calls for transport in transports]
        steps(model, rank, 5)
        return [transport.calls - calls for transport, calls in zip(transports, before, strict=True)]

    assert run_ranks(2, one) == [[0, 5]] * 2


@pytest.mark.parametrize("why", ["an error", "another operator"])
def test_a_rank_that_cannot_look_ends_the_step_of_all(why, monkeypatch):
    """And all go on with the next one, without a machine: the group's transport is given up."""

    def blind(transport, *_):
        if transport.rank == 1:
            raise RuntimeError("an error")
        return gathered(transport, [1.0])

    if why == "an error":
        monkeypatch.setattr(look, "times_as_long", blind)

    def one(rank, group):
        fo.use_machine(group, WIDE)
        model = apply(stack(), None, group, small_bytes=0)
        steps(model, rank, 1)
        transport = transport_of(group)
        transport.drift.wants_look = True
        if why == "another operator" and rank == 1:
            transport.busy.acquire()  # of a second thread
        with pytest.raises(RuntimeError) as caught:
            steps(model, rank, 1)
        steps(model, rank, 1)
        return caught.value, transport.failed, model._engine.account._predicted

    found = run_ranks(3, one, timeout_s=10.0)
    errors, failed, predicted = zip(*found, strict=True)
    assert all(failed)
    assert predicted == (None,) * 3
    assert type(errors[1]) is RuntimeError
    assert ("an operator is running on this group" if why == "another operator" else why) in str(errors[1])
    assert all(isinstance(error, fo.PeerError) and "rank 1" in str(error) for error in (errors[0], errors[2]))
