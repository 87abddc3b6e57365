import math
import pickle
from dataclasses import replace

import pytest

from flashoverlap.machine import Kernel, Link, Machine
from flashoverlap.matmul import Matmul, Product

LINK = Link(latency_s=1e-3, bytes_per_s=1e6)


def test_a_kernel_costs_a_fixed_part_and_a_part_by_row():
    assert Kernel(fixed_s=2.0, seconds_per_row=0.5).seconds(4) == 4.0
    assert Kernel().seconds(1000) == 0.0


def test_a_kernel_may_be_made_of_matmuls():
    products = (Product(Matmul(1e3), 5, 7), Product(Matmul(1e3), 7, 5, summed=True))
    assert Kernel(1.0, 0.5, products).seconds(4) == pytest.approx(1.0 + 2.0 + 2 * 2 * 4 * 5 * 7 / 1e3)


def test_a_transfer_costs_latency_and_bytes_and_nothing_if_empty():
    machine = Machine(LINK, {})
    assert machine.transfer_s(1000) == pytest.approx(2e-3)
    assert machine.transfer_s(0) == 0.0
    assert Machine(Link(1e-3, math.inf), {}).transfer_s(10**12) == 1e-3


def test_measured_transfers_hold_where_there_are_any():
    link = Link(1.0, 100.0, sizes=((10, 2.0), (20, 6.0)))
    assert [link.seconds(size) for size in (0, 5, 10, 15, 20, 120)] == [0.0, 1.5, 2.0, 4.0, 6.0, 7.0]
    assert Link(3.0, 100.0, sizes=((10, 2.0),)).seconds(5) == 2.0  # what was measured is below the latency


def test_a_transfer_goes_at_the_pace_of_the_slower_rank():
    slow = Link(2e-3, 1e5)
    machine = Machine(LINK, {}, links=(LINK, LINK, slow))
    assert machine.transfer_s(1000, 0, 1) == pytest.approx(2e-3)
    assert machine.transfer_s(1000, 0, 2) == machine.transfer_s(1000, 2, 1) == pytest.approx(12e-3)
    assert machine.collective_s(2, 1000) == pytest.approx(2 * 2e-3 + 10e-3)


def test_an_uplink_is_shared_between_nodes_and_no_matter_inside():
    machine = Machine(LINK, {}, nodes=(2, 1), uplink=Link(5e-3, 5e5))
    assert machine.transfer_s(1000, 0, 1, sharing=9) == pytest.approx(2e-3)
    assert machine.transfer_s(1000, 0, 2) == pytest.approx(5e-3 + 2e-3)
    assert machine.transfer_s(1000, 2, 1, sharing=3) == pytest.approx(5e-3 + 6e-3)
    assert machine.collective_s(2, 1000, sharing=2.0) == pytest.approx(2 * 5e-3 + 4e-3)
    fast = Machine(LINK, {}, nodes=(2, 1), uplink=Link(0.0, 1e9))
    assert fast.transfer_s(1000, 0, 2, sharing=2) == pytest.approx(2e-3)  # the ranks' own wires are the slower ones


def test_nodes_and_links_are_those_of_the_ranks():
    Machine(LINK, {}, nodes=(2, 1), links=(LINK,) * 3).check_ranks(3)
    with pytest.raises(ValueError, match="the nodes hold 3 ranks, and there are 4"):
        Machine(LINK, {}, nodes=(2, 1)).check_ranks(4)
    with pytest.raises(ValueError, match="the links are of 2 ranks, and there are 4"):
        Machine(LINK, {}, links=(LINK,) * 2).check_ranks(4)


def test_a_collective_costs_its_rounds_and_its_bytes_at_the_efficiency_of_the_backend():
    machine = Machine(LINK, {}, collective_efficiency=0.5)
    assert machine.collective_s(3, 1000) == pytest.approx(3e-3 + 2e-3)
    assert machine.collective_s(3, 0) == 0.0


def test_an_unknown_kernel_is_named_beside_those_known():
    machine = Machine(LINK, {"up": Kernel(), "down": Kernel()})
    assert machine.kernel("up") == Kernel()
    with pytest.raises(ValueError, match="no kernel 'mm'; known: down, up"):
        machine.kernel("mm")
    with pytest.raises(ValueError, match="known: none"):
        Machine(LINK, {}).kernel("mm")


def test_a_machine_is_a_key_and_does_not_follow_the_dict_it_was_made_from():
    kernels = {"up": Kernel(1.0), "down": Kernel(2.0)}
    machine = Machine(LINK, kernels)
    turned = Machine(LINK, dict(reversed(kernels.items())))
    assert machine == turned
    assert hash(machine) == hash(turned)
    kernels["mm"] = Kernel()
    assert machine == turned
    assert len({machine, turned, replace(machine, ports=2), replace(machine, collective_efficiency=0.5)}) == 3
    assert machine != replace(machine, nodes=(2,))
    assert pickle.loads(pickle.dumps(machine)) == machine


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["fixed_s", "seconds_per_row"])
def test_kernel_costs_are_checked(name, bad):
    with pytest.raises(ValueError, match=f"{name} must be a finite number of 0 or more, not {bad}"):
        Kernel(**{name: bad})


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "message"),
    [
        (-1e-6, 1.0, "latency_s must be a finite number"),
        (0.0, 0.0, "bytes_per_s must be a number above 0, not 0.0"),
        (0.0, -5.0, "bytes_per_s must be a number above 0, not -5.0"),
        (0.0, math.nan, "bytes_per_s"),
    ],
)
def test_links_are_checked(latency_s, bytes_per_s, message):
    with pytest.raises(ValueError, match=message):
        Link(latency_s, bytes_per_s)


def test_measured_transfers_and_bursts_are_checked():
    with pytest.raises(ValueError, match=r"ascending size, not \[20, 10\]"):
        Link(0.0, 1.0, sizes=((20, 1.0), (10, 1.0)))
    with pytest.raises(ValueError, match="seconds of a measured transfer"):
        Link(0.0, 1.0, sizes=((20, -1.0),))
    with pytest.raises(ValueError, match="an infinite bandwidth has no burst"):
        Link(0.0, math.inf, burst_bytes=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ports": 0}, "ports must be a whole number of 1 or more, not 0"),
        ({"ports": 1.5}, "ports must be a whole number"),
        ({"contention": -0.1}, "contention must be"),
        ({"issue_s": math.inf}, "issue_s must be"),
        ({"collective_efficiency": 0.0}, "collective_efficiency must be a number above 0"),
        ({"kernels": {"mm": 1e-3}}, "kernel 'mm' must be a Kernel, not 0.001"),
        ({"nodes": (2, 0)}, r"nodes must have one rank or more each, not \(2, 0\)"),
        ({"uplink": LINK}, "an uplink is what a node's ranks share"),
    ],
)
def test_machines_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        replace(Machine(LINK, {}), **change)
