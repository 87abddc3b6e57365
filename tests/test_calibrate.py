"""Calibration: one machine for all ranks, kept on disk, and never trusted in silence."""

import importlib
import json
import platform
import re
import socket
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import flashoverlap.torch as fo
from flashoverlap import Link, Machine, choice, machine_file
from flashoverlap.cli import app
from flashoverlap.lab import lab_unavailable
from flashoverlap.matmul import Matmul
from flashoverlap.torch import look, machine_cache, measured, planned, steps, wire, work
from flashoverlap.torch.transport import Silent, transport_of
from flashoverlap.torch.wire import Partners, between, gathered, inside
from ranks import outcomes, run_ranks

calibrating = importlib.import_module("flashoverlap.torch.calibrate")  # the name in the package is the function


@pytest.fixture
def quick(monkeypatch):
    """Measures too little to be right, and everything that there is to measure."""
    monkeypatch.setattr(wire, "STEP_S", 1e-3)
    monkeypatch.setattr(wire, "MOST_BYTES", 1 << 18)
    monkeypatch.setattr(wire, "_EMPTY_EXCHANGES", 3)
    monkeypatch.setattr(work, "_ROWS", (1, 16))
    monkeypatch.setattr(work, "_INNER", (32, 64))
    monkeypatch.setattr(work, "_OUTER", (32,))
    monkeypatch.setattr(work, "_LEAST_S", 1e-5)
    monkeypatch.setattr(work, "_ADDED_BYTES", 1 << 16)
    monkeypatch.setattr(work, "_ACTIVATED_BYTES", 1 << 10)
    monkeypatch.setattr(work, "_QUERIES", 8)
    monkeypatch.setattr(work, "_KEYS", 16)
    monkeypatch.setattr(steps, "_ROUNDS", 3)
    monkeypatch.setattr(steps, "_LONG_ROUNDS", 2)
    monkeypatch.setattr(measured, "_SHORT", (2, 16, 16))
    monkeypatch.setattr(measured, "SHAPE", (8, 64, 64))
    monkeypatch.setattr(calibrating, "SHAPE", (8, 64, 64))


@pytest.fixture
def believed(monkeypatch):
    """What a check of a cached machine takes, of whatever it says, is not looked at."""
    monkeypatch.setattr(calibrating, "_off", lambda *_: "")


def calibrated(ranks, folder, **options):
    """Calibrates one new group; ``folder`` may be one for each rank."""

    def run(rank, group):
        own = folder[rank] if isinstance(folder, list) else folder
        machine = fo.calibrate(group, folder=own, **options)
        assert transport_of(group).machine is machine
        return machine

    return run_ranks(ranks, run)


# --- whom a rank meets ------------------------------------------------------------------------------------------------


def test_ranks_of_a_node_rotate_among_themselves():
    assert [inside(rank, (3, 2), 1) for rank in range(5)] == [(1, 2), (2, 0), (0, 1), (4, 4), (3, 3)]
    assert [inside(rank, (3, 1), 2) for rank in range(4)] == [(2, 1), (0, 2), (1, 0), (3, 3)]
    with pytest.raises(ValueError, match=r"rank 4 is on none of nodes \(3, 1\)"):
        inside(4, (3, 1), 1)


def test_one_rank_of_each_node_meets_that_of_the_next():
    assert [between(rank, (2, 1, 2)) for rank in range(5)] == [(2, 3), (1, 1), (3, 0), (0, 2), (4, 4)]


@pytest.mark.parametrize(
    ("hosts", "nodes"),
    [([1, 1], (2,)), ([1, 1, 2], (2, 1)), ([1, 2], (1, 1)), ([1, 2, 1], ()), ([1, 1, 2, 2, 3], (2, 2, 1))],
)
def test_ranks_of_one_host_are_a_node(hosts, nodes):
    assert calibrating._nodes(hosts) == nodes


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_ranks_have_one_machine_bit_by_bit(ranks, quick, tmp_path):
    machines = calibrated(ranks, tmp_path)
    assert len(set(machines)) == len({repr(machine) for machine in machines}) == 1
    machine = machines[0]
    assert machine.matmul is not None
    assert [point[:3] for point in machine.matmul.efficiency] == [(1, 32, 32), (1, 64, 32), (16, 32, 32), (16, 64, 32)]
    assert max(point[3] for point in machine.matmul.efficiency) == 1.0
    assert machine.issue_s > 0
    assert machine.link.bytes_per_s > 0
    assert machine.nodes == ()
    if ranks > 1:
        assert machine.link.latency_s > 0
        assert machine.link.sizes[0][0] == 1024
        assert all(seconds >= machine.link.latency_s for _, seconds in machine.link.sizes)
        assert 0 < machine.collective_efficiency <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_have_machines_of_their_own(dtype, quick, tmp_path):
    calibrated(2, tmp_path, dtype=dtype)
    calibrated(2, tmp_path)
    abouts = [json.loads(path.read_text())["about"] for path in tmp_path.iterdir()]
    assert sorted(about["dtype"] for about in abouts) == sorted([str(dtype).removeprefix("torch."), "float32"])


def test_nodes_have_an_uplink(quick, tmp_path):
    machine, *_ = calibrated(3, tmp_path, nodes=(2, 1))
    assert machine.nodes == (2, 1)
    assert machine.uplink is not None
    assert machine.uplink.bytes_per_s > 0


@pytest.mark.parametrize("nodes", [(3,), (1, 1, 1)])
def test_nodes_that_share_nothing_are_none(nodes, quick, tmp_path):
    assert calibrated(3, tmp_path, nodes=nodes)[0].nodes == ()


class ScriptedWire(wire.Wire):
    """A wire of which each rank has a rate, and takes that of the slower end."""

    RATES = (1e9, 1e9, 1e8, 1e9)

    def arrivals(self, partners, sizes):
        gathered(self._transport, [])
        slower = min(self.RATES[self._transport.rank], self.RATES[partners.frm])
        return [sum(sizes[: place + 1]) / slower for place in range(len(sizes))]


def test_a_slow_rank_has_a_link_of_its_own(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "Wire", ScriptedWire)
    machine, *_ = calibrated(4, tmp_path)
    assert [link.bytes_per_s for link in machine.links] == pytest.approx(ScriptedWire.RATES)
    assert machine.link.bytes_per_s == pytest.approx(1e8)


def test_a_burst_is_told_from_a_rate(quick, monkeypatch):
    class Bucket(ScriptedWire):
        def arrivals(self, partners, sizes):
            full = super().arrivals(partners, sizes)
            return [max(0.0, seconds - 5e-5) for seconds in full]  # 50,000 bytes at 1e9 a second

    def run(_, group):
        timed, near = Bucket(transport_of(group), torch.device("cpu")), Partners(1 - group.rank(), 1 - group.rank())
        return timed.rate(near, 1 << 18), timed.burst_bytes(near, 1 << 17, 0.0, 1e9)

    assert run_ranks(2, run) == [(pytest.approx(1e9), pytest.approx(50_000))] * 2


def test_the_best_shape_is_the_peak():
    seconds = {(1, 1, 1): 1.0, (1, 10, 10): 3.0, (10, 10, 10): 11.0}
    assert work.matmul_of(seconds, 1e9) == Matmul(200.0, 1.0, 1e9, ((1, 10, 10, 0.5), (10, 10, 10, 1.0)))


def test_attention_is_so_many_times_slower_than_its_matmuls():
    matmul = Matmul(1e9)
    pairs = 2 * 64 * 512 * 1024  # of 2 heads of 64 features
    forward_s, backward_s = 3 * 4 * pairs / 1e9, 5 * 10 * pairs / 1e9
    found = work.with_attention(matmul, (forward_s, backward_s, 2 * forward_s * 0.75), 4)
    assert found.attention == pytest.approx((3.0, 5.0))
    assert found.keys_at_once == 512  # blocks of which three in four are left of 1024 x 1024
    assert work.with_attention(matmul, (1.0, 1.0, 1.0), 4).keys_at_once == 0  # all is spared that can be
    assert work.with_attention(matmul, (1.0, 1.0, 2.1), 4).keys_at_once == 1024  # nothing is


def test_calls_take_turns():
    order = []
    seconds = work.Stopwatch(torch.device("cpu")).seconds_of_each([lambda: order.append(0), lambda: order.append(1)])
    assert len(seconds) == 2
    assert order[:2] == [0, 1]
    assert sum(first != second for first, second in pairwise(order[2:])) == 2 * work._TURNS - 1


def test_what_matmuls_lose_to_messages_beside_them_is_what_posting_costs(monkeypatch):
    monkeypatch.setattr(
        steps, "_seconds", lambda schedule, transport, *_: 0.0 if isinstance(transport, Silent) else 8e-3
    )

    class Other:
        rank, world_size = 0, 2

    assert steps.steps_of(Other(), torch.device("cpu"), 0.0, int).post_s == pytest.approx(1e-3)


def test_random_numbers_of_the_caller_stay_as_they_are(quick, tmp_path):
    before = torch.random.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert fo.calibrate(Silent(), folder=tmp_path).matmul
    assert torch.equal(torch.random.get_rng_state(), before)


def test_in_inference_mode(quick, tmp_path):
    def run(_, group):
        with torch.inference_mode():
            return fo.calibrate(group, folder=tmp_path)

    assert run_ranks(2, run)[0].matmul


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_a_machine_is_measured_once(quick, believed, tmp_path, monkeypatch):
    first = calibrated(2, tmp_path)
    (path,) = tmp_path.iterdir()
    assert machine_file.read(path) == first[0]
    monkeypatch.setattr(calibrating, "measure", lambda *_: pytest.fail("measured again"))
    assert calibrated(2, tmp_path) == first


def test_another_number_of_ranks_or_threads_is_another_place(quick, believed, tmp_path, monkeypatch):
    calibrated(2, tmp_path)
    calibrated(3, tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    calibrated(2, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_anew_measures_whatever_is_kept(quick, believed, tmp_path):
    calibrated(2, tmp_path)
    (path,) = tmp_path.iterdir()
    machine_file.write(path, Machine(Link(1.0, 1.0)), {})
    assert calibrated(2, tmp_path, anew=True)[0] == machine_file.read(path) != Machine(Link(1.0, 1.0))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path, _: path.write_text(path.read_text()[:100]), "machine file .*json: "),
        (lambda path, _: path.write_bytes(b"\xff"), "machine file .*json: "),
        (lambda path, _: path.write_text("[" * 200_000), "machine file .*json: it is nested too deeply"),
        (lambda path, machine: machine_file.write(path, machine, {"host": "elsewhere"}), "was measured elsewhere: host 'elsewhere'"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_told_and_measured_anew(spoil, message, quick, believed, tmp_path):
    first = calibrated(2, tmp_path)
    (path,) = tmp_path.iterdir()
    spoil(path, first[0])
    with pytest.warns(RuntimeWarning, match=f"calibrate: .*{message}.*; it is measured anew") as told:
        second = calibrated(2, tmp_path)
    assert len(told) == 2  # on each rank
    assert second[0] == second[1] == machine_file.read(path)
    assert calibrated(2, tmp_path) == second


def test_ranks_with_different_caches_are_told_and_measured_anew(quick, believed, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    calibrated(2, folders)
    paths = [next(folder.iterdir()) for folder in folders]
    assert paths[0].read_text() == paths[1].read_text()
    paths[1].unlink()
    message = r"the ranks' caches differ: ranks \[0\] have a machine; ranks \[1\] have none; it is measured anew"
    with pytest.warns(RuntimeWarning, match=message):
        calibrated(2, folders)
    content = json.loads(paths[1].read_text())
    content["machine"]["issue_s"] *= 2
    paths[1].write_text(json.dumps(content))
    with pytest.warns(RuntimeWarning, match=r"ranks \[0, 1\] have a machine \(not the same\); it is measured anew"):
        machines = calibrated(2, folders)
    assert machines[0] == machines[1] == machine_file.read(paths[0]) == machine_file.read(paths[1])


@pytest.mark.parametrize(("rate", "times"), [(2e9, "2"), (5e8, "0.5")])
def test_a_machine_that_does_not_hold_is_told_and_measured_anew(rate, times, quick, tmp_path, monkeypatch):
    first, _ = calibrated(2, tmp_path)
    (path,) = tmp_path.iterdir()
    machine = replace(first, link=Link(0.0, rate), links=())
    machine_file.write(path, machine, json.loads(path.read_text())["about"])
    monkeypatch.setattr(look, "Wire", ScriptedWire)  # of 1e9 bytes a second
    with pytest.warns(
        RuntimeWarning, match=rf"machine file .*json: .*a transfer takes {times} times as long as it says"
    ):
        calibrated(2, tmp_path)
    assert machine_file.read(path) != machine


def test_a_machine_that_holds_is_not_measured_again(quick, tmp_path, monkeypatch):
    first, _ = calibrated(2, tmp_path)
    (path,) = tmp_path.iterdir()
    machine = replace(first, link=Link(0.0, 1.2e9), links=(), matmul=None)
    machine_file.write(path, machine, json.loads(path.read_text())["about"])
    monkeypatch.setattr(look, "Wire", ScriptedWire)
    assert calibrated(2, tmp_path) == [machine, machine]


def test_a_folder_that_cannot_be_written_is_told(quick, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match=r"could not be kept: .*file.*; it will be measured again"):
        calibrated(2, tmp_path / "file")


# --- first use, and machines of the caller's --------------------------------------------------------------------------


def linear(rank, group, rows, overlap=fo.Overlap(), features=64):
    """A call of so many rows of 64 features; its record's reason code."""
    x, weight = torch.ones(rows // group.size(), features), torch.ones(8, features)
    fo.all_gather_linear(x, weight, group=group, overlap=overlap)
    return transport_of(group)


@pytest.fixture
def measuring(monkeypatch, tmp_path, quick, believed):
    """Groups are measured at first use, as they are outside of tests; what is kept goes here."""
    monkeypatch.setattr(planned.Planned, "measures", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choice, "WORTH_BYTES", 1 << 14)
    fo.report().clear()
    (tmp_path / "flashoverlap").mkdir()
    return tmp_path / "flashoverlap"


def test_the_first_call_that_moves_enough_measures_the_group(measuring):
    def run(rank, group):
        assert linear(rank, group, 8).machine is None
        transport = linear(rank, group, 64)
        measured_first, calls = transport.machine, transport.calls
        linear(rank, group, 64)
        linear(rank, group, 8)
        assert transport.machine is measured_first
        assert transport.calls == calls + 2
        return measured_first

    first, second = run_ranks(2, run)
    assert first == second is not None
    assert len(list(measuring.iterdir())) == 1
    codes = [record.reason_code for record in fo.report()]
    assert codes[0] == "small"
    assert set(codes[1:]) & {"planned", "plain"}


def test_what_is_wrong_with_a_file_stands_in_the_report_at_first_use(measuring):
    run_ranks(2, lambda r, g: linear(r, g, 64))
    (path,) = measuring.iterdir()
    path.write_text("{}")
    assert fo.report().notes == ()
    run_ranks(2, lambda r, g: linear(r, g, 64))
    told = f"calibrate: machine file {path}: it is none of a machine; it is measured anew"
    assert fo.report().notes == (told, told)  # of each rank


@pytest.mark.parametrize("overlap", [fo.Overlap("off"), fo.Overlap("flash"), fo.Overlap("collective")])
def test_other_modes_measure_nothing(overlap, measuring):
    assert [transport.machine for transport in run_ranks(2, lambda r, g: linear(r, g, 64, overlap))] == [None, None]


def test_one_rank_measures_nothing(measuring):
    assert run_ranks(1, lambda r, g: linear(r, g, 64))[0].machine is None


def test_measuring_can_be_turned_off(measuring):
    def run(rank, group):
        fo.use_machine(group, None)
        return linear(rank, group, 64).machine

    assert run_ranks(2, run) == [None, None]
    assert not list(measuring.iterdir())


def test_a_machine_of_the_callers_is_planned_with(measuring):
    machine = Machine(Link(1e-5, 1e6), matmul=Matmul(1e9))

    def run(rank, group):
        fo.use_machine(group, machine)
        return linear(rank, group, 64).machine

    assert run_ranks(2, run) == [machine, machine]
    assert {record.reason_code for record in fo.report()} <= {"planned", "plain"}


def test_machines_that_differ_between_ranks_are_refused():
    machines = [Machine(Link(1e-5, rate), matmul=Matmul(1e9)) for rate in (1e6, 2e6)]
    _, errors = outcomes(2, lambda rank, group: fo.use_machine(group, machines[rank]))
    assert all(isinstance(error, ValueError) and "the ranks of the group disagree" in str(error) for error in errors)


def test_a_machine_of_other_ranks_is_refused():
    machine = Machine(Link(1e-5, 1e6), matmul=Matmul(1e9), nodes=(2, 1), uplink=Link(1e-4, 1e5))
    _, errors = outcomes(2, lambda rank, group: fo.use_machine(group, None if rank else machine))
    assert isinstance(errors[0], ValueError)
    assert isinstance(errors[1], fo.PeerError)
    assert all("the nodes hold 3 ranks, and there are 2" in str(error) for error in errors)


def test_a_rank_that_plans_otherwise_is_told():
    """As after a machine was set behind the library's back: ranks that plan differently would wait for each other."""

    def run(rank, group):
        transport_of(group).use(Machine(Link(1e-5, 1e6 * (1 + rank)), matmul=Matmul(1e9)))
        linear(rank, group, 64)

    _, errors = outcomes(2, run)
    assert all(isinstance(error, ValueError) and "planned for machine" in str(error) for error in errors)


# --- refusals and failures --------------------------------------------------------------------------------------------


def test_ranks_that_ask_for_different_things_are_refused(quick, tmp_path):
    dtypes = (torch.float32, torch.bfloat16)
    _, errors = outcomes(2, lambda rank, group: fo.calibrate(group, dtype=dtypes[rank], folder=tmp_path))
    for error in errors:
        assert isinstance(error, ValueError)
        assert "rank 0: calibrate(torch.float32" in str(error)
        assert "rank 1: calibrate(torch.bfloat16" in str(error)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": (2, 1)}, r"calibrate\(nodes=\(2, 1\)\): the group has 2 ranks"),
        ({"nodes": (2, 0)}, r"calibrate\(nodes=\(2, 0\)\): the group has 2 ranks"),
        ({"dtype": torch.int32}, "takes a dtype that matmuls are made in, not torch.int32"),
    ],
)
def test_bad_arguments_are_refused_on_every_rank(options, message, tmp_path):
    _, errors = outcomes(2, lambda rank, group: fo.calibrate(group, folder=tmp_path, **({} if rank else options)))
    assert isinstance(errors[0], ValueError)
    assert isinstance(errors[1], fo.PeerError)
    assert all(re.search(message, str(error)) for error in errors)


def test_a_rank_that_fails_takes_the_others_with_it(quick, tmp_path, monkeypatch):
    def failing(transport, *_):
        if transport.rank == 1:
            raise ArithmeticError("no matmuls here")
        return wire.gathered(transport, [1.0])

    monkeypatch.setattr(calibrating, "measure", failing)
    _, errors = outcomes(3, lambda _, group: fo.calibrate(group, folder=tmp_path))
    assert isinstance(errors[1], ArithmeticError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, fo.PeerError)
        assert "calibrate: rank 1" in str(error)
    assert not list(tmp_path.iterdir())


def test_an_operator_meanwhile_is_refused(tmp_path):
    transport = Silent()
    with transport.busy, pytest.raises(RuntimeError, match="an operator is running on this group"):
        fo.calibrate(transport, folder=tmp_path)


@pytest.mark.parametrize("told", [None, "", "not/absolute"])
def test_the_users_cache_is_the_default(told, monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    if told is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", told)
    assert machine_cache.default_folder() == tmp_path / ".cache" / "flashoverlap"


# --- on wires that take time ------------------------------------------------------------------------------------------


def test_wires_of_the_lab_are_measured_as_they_are(tmp_path):
    reason = lab_unavailable()
    if reason:
        pytest.skip(reason)
    file = tmp_path / "machine.json"
    options = ["--ranks", "4", "--nodes", "2", "--link", "200mbit", "--uplink", "50mbit"]
    done = CliRunner().invoke(app, ["calibrate", *options, "--folder", str(tmp_path), "--json", str(file)])
    assert done.exit_code == 0, done.output
    machine = machine_file.read(file, {"host": platform.node(), "ranks": 4, "nodes": [2, 2], "dtype": "float32"})
    assert machine.nodes == (2, 2)
    assert machine.uplink is not None
    assert 2.5 <= machine.link.bytes_per_s / machine.uplink.bytes_per_s <= 6.0
    assert 0.6 * 25e6 <= machine.link.bytes_per_s <= 1.2 * 25e6
    (kept,) = tmp_path.glob("machine-*.json")
    assert machine_file.read(kept) == machine


def test_a_file_of_the_command_says_where_it_holds_as_the_cache_does(quick, monkeypatch, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in {**told, "XDG_CACHE_HOME": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    done = CliRunner().invoke(app, ["calibrate", "--dtype", "bfloat16", "--json", str(tmp_path / "machine.json")])
    assert done.exit_code == 0, done.output
    (kept,) = (tmp_path / "flashoverlap").iterdir()
    about = machine_file.place(tmp_path / "machine.json")
    assert about == {**machine_file.place(kept), "nodes": [1]}  # the cache tells nodes where ranks share a wire
    assert (about["host"], about["dtype"], about["ranks"]) == (platform.node(), "bfloat16", 1)
    assert {"backend", "device", "cores", "threads", "torch", "flashoverlap", "hosts", "members"} <= about.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int8"], "--dtype int8: unknown"),
        (["--link", "fast"], "'fast' is not understood"),
        (["--nodes", "2"], "nodes 2 need a link and an uplink"),
        (["--json", "/nowhere/at/all.json"], "there is no directory /nowhere/at"),
    ],
)
def test_the_command_refuses(arguments, message):
    done = CliRunner().invoke(app, ["calibrate", *arguments])
    assert done.exit_code == 2
    assert message in done.output


def test_a_rank_of_torchrun_takes_no_options_of_the_lab(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    done = CliRunner().invoke(app, ["calibrate", "--link", "1gbit"])
    assert done.exit_code == 2
    assert "--link is of the lab, and these ranks have been started already" in done.output
