"""The order of events in a data-parallel step: what is posted before what is computed. Never milliseconds."""

import copy
import threading

import pytest
import torch
from torch import nn

import data_parallel_seeds
from flashoverlap import Overlap
from flashoverlap.torch.data_parallel import apply
from flashoverlap.torch.data_parallel.flight import Reduction
from flashoverlap.torch.data_parallel.linear import Fused
from flashoverlap.torch.transport import DONE, Silent
from ranks import run_ranks


class Slow(Silent):
    """Rank 0 of 2, to which nothing comes before it is waited for."""

    def __init__(self, events):
        super().__init__(0, 2)
        self.events = events

    def post(self, send, to, recv, frm, after=None, expected=None):
        self.events.append(f"post {send.numel()}")
        return DONE, Held(self.events, recv)


class Held:
    name, posted_s, done_s, peer, arrived = "", 0.0, 0.0, 1, False

    def __init__(self, events, recv):
        self.events, self.recv = events, recv

    def wait(self):
        if not self.arrived:
            self.events.append(f"wait {self.recv.numel()}")
            self.recv.zero_()
            self.arrived = True
        return 0.0


@pytest.fixture
def events(monkeypatch):
    found = []
    wgrad, dgrad = Reduction._wgrad, Fused.input_gradient

    def log_wgrad(self, op):
        found.append(f"wgrad {self._blocks[0].numel()} of {'own' if op.reads[0] == 'h0' else 'other'}")
        wgrad(self, op)

    def log_dgrad(self, grad, weight):
        found.append(f"dgrad {weight.numel()}")
        return dgrad(self, grad, weight)

    monkeypatch.setattr(Reduction, "_wgrad", log_wgrad)
    monkeypatch.setattr(Fused, "input_gradient", log_dgrad)
    return found


def step(events, mode, **options):
    """Backward of a step in which the order of the layers is known."""
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 8, bias=False))
    apply(model, None, Slow(events), overlap=Overlap(mode=mode, **options), small_bytes=0)
    for _ in range(2):
        events.clear()
        model(torch.ones(3, 4)).sum().backward()
    return events


def test_blocks_of_others_leave_first_and_nothing_waits_before_the_end(events):
    assert step(events, "flash") == [
        "wgrad 24 of other",
        "post 24",
        "wgrad 24 of own",
        "dgrad 48",
        "wgrad 12 of other",
        "post 12",
        "wgrad 12 of own",
        # backward is through; the first layer's sum is waited for, and sent on, before the second's
        "wait 24",
        "post 24",
        "wait 12",
        "post 12",
        "wait 24",
        "wait 12",
    ]


def test_splits_leave_one_after_another(events):
    found = step(events, "flash", splits=2)
    assert found[:6] == ["wgrad 12 of other", "post 12", "wgrad 12 of own"] * 2
    assert found[6] == "dgrad 48"


def test_slices_leave_whole_behind_the_next_layer(events):
    found = step(events, "slice")
    assert found[:4] == ["dgrad 48", "wgrad 24 of other", "post 24", "wgrad 24 of own"]
    assert found.index("wait 24") > found.index("post 12")


def test_off_moves_everything_at_the_end(events):
    found = step(events, "off")
    assert found[0] == "dgrad 48"
    assert found[1:7] == ["wgrad 24 of other", "post 24", "wgrad 24 of own", "wait 24", "post 24", "wait 24"]


def test_a_unit_that_is_not_ready_holds_the_others_up_until_the_end(events):
    """Whatever a rank leaves out, all ranks post in one order."""

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 6, bias=False), nn.Linear(4, 8, bias=False)

        def forward(self, x, both):
            return self.first(x).sum() + (self.last(x).sum() if both else 0)

    model = apply(Skips(), None, Slow(events), small_bytes=0)
    for both in (True, True, False):
        events.clear()
        model(torch.ones(3, 4), both).backward()
    first = model._engine.gradients.order.numbers
    # the one left out was in the pass before, so the others may count on it: it travels in its turn, at the end
    assert [event for event in events if event.startswith("post")] == ["post 16", "post 12"] * 2
    assert sorted(first) == [0, 1]
    assert model.last.weight.grad is not None  # of the pass before, which nobody has cleared


# --- orders that ranks have of their own ------------------------------------------------------------------------------


def test_c37_hash_seeds_of_their_own_make_no_order_of_their_own():
    """200 steps of late ranks, 2 x 2, of which each goes through a set of branches as its hashes have it."""
    told = data_parallel_seeds.outcomes()
    assert len({tuple(rank["order"]) for rank in told}) == len(told)
    for ranks in ((0, 1), (2, 3), (0, 2), (1, 3)):
        first, second = ([sizes for group, sizes in told[rank]["posted"] if group == list(ranks)] for rank in ranks)
        assert first
        assert first == second
        assert len(first[-1]) > data_parallel_seeds.STEPS


def made(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))).double()


def in_two_threads(work):
    """What goes wrong where ``work(0)`` and ``work(1)`` run side by side."""
    errors, start = [], threading.Barrier(2)

    def main(number):
        try:
            start.wait()
            work(number)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=main, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_c37_two_threads_with_groups_of_their_own():
    x, starts = torch.arange(48, dtype=torch.float64).view(2, 3, 8) / 48, [made(1), made(2)]

    def train(number):
        def main(rank, group):
            reference, model = copy.deepcopy(starts[number]), apply(copy.deepcopy(starts[number]), None, group)
            for _ in range(50):
                (sum(reference(each).square().sum() for each in x) / 2).backward()
                model(x[rank]).square().sum().backward()
                for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(found.grad, wanted.grad)

        run_ranks(2, main)

    assert in_two_threads(train) == []


def test_c37_two_threads_on_one_model_are_loud():
    def main(_, group):
        model = apply(made(), None, group, small_bytes=0)

        def work(number):
            for _ in range(200):
                model(torch.ones(3, 8, dtype=torch.float64)).sum().backward()

        return in_two_threads(work)

    assert all(run_ranks(2, main, timeout_s=3))
