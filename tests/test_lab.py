"""The lab: links, environments, namespaces, rates, failures, and nothing left behind."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import flashoverlap
from flashoverlap.lab import Lab, LabError, Link, lab_unavailable, run_command
from flashoverlap.lab.bucket import bucket, packet_bytes
from flashoverlap.lab.changing import timeline
from flashoverlap.lab.topology import Topology, node_of

SOURCE = Path(flashoverlap.__file__).parents[1]

# Prints what a rank can see of itself, as one JSON line.
WHO = """
import json, os, socket
print(json.dumps({
    "env": dict(os.environ), "pid": os.getpid(), "sid": os.getsid(0), "uid": os.getuid(),
    "netns": os.readlink("/proc/self/ns/net"), "interfaces": [name for _, name in socket.if_nameindex()],
}))
"""

# Two ranks: those named in argv[1] send zeros for argv[2] seconds, each receives until the other is done.
# Prints the bytes per second that came in, as one JSON line.
TRAFFIC = """
import json, os, socket, sys, threading, time
rank, senders, seconds = int(os.environ["RANK"]), json.loads(sys.argv[1]), float(sys.argv[2])
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.create_server(where) as server:
        peer = server.accept()[0]
else:
    while True:
        try:
            peer = socket.create_connection(where)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
def send():
    end = time.monotonic() + seconds
    while rank in senders and time.monotonic() < end:
        peer.sendall(bytes(1 << 16))
    peer.shutdown(socket.SHUT_WR)
thread = threading.Thread(target=send)
start = time.monotonic()
thread.start()
received = 0
while chunk := peer.recv(1 << 20):
    received += len(chunk)
wall = time.monotonic() - start
thread.join()
peer.close()
print(json.dumps({"rank": rank, "bytes_per_s": received / wall}))
"""

# Every rank sends zeros to the rank that argv[1] names for it (-1: to none) for argv[2] seconds, counted from where all
# are connected. Prints the bytes per second that came in during each tenth of that time.
FLOWS = """
import json, os, socket, sys, threading, time
rank, to, seconds = int(os.environ["RANK"]), json.loads(sys.argv[1]), float(sys.argv[2])
port = int(os.environ["MASTER_PORT"])
def connect(to):
    while True:
        try:
            return socket.create_connection((f"10.77.0.{to + 1}", port))
        except ConnectionRefusedError:
            time.sleep(0.01)
server = socket.create_server(("0.0.0.0", port))
out = None if to[rank] < 0 else connect(to[rank])
peer = server.accept()[0] if rank in to else None
def send():
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        out.sendall(bytes(1 << 16))
    out.close()
thread = threading.Thread(target=send) if out else None
start = time.monotonic()
if thread:
    thread.start()
tenths = [0] * 10
while peer and (chunk := peer.recv(1 << 20)):
    tenths[min(9, int((time.monotonic() - start) / seconds * 10))] += len(chunk)
if thread:
    thread.join()
print(json.dumps([10 * count / seconds for count in tenths]))
"""

ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((250_000,), 1.0 + dist.get_rank())
dist.all_reduce(x)
print(x.unique().tolist())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def namespaces() -> None:
    reason = lab_unavailable()
    if reason:
        pytest.skip(reason)


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def run_json(lab: Lab, command: list[str], env: dict[str, str] | None = None) -> list[dict]:
    """Runs a command of which each rank prints one JSON line; returns them by rank."""
    result = lab.run(command, env=env, stdout=io.StringIO(), timeout_s=60)
    return [json.loads(tail.splitlines()[-1]) for tail in result.tails]


def pythonpath(*more: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SOURCE, *more)))}


# ---------------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("1gbit", 125_000_000),
        ("400mbit", 50_000_000),
        ("2.5gbit", 312_500_000),
        ("100kbit", 12_500),
        (" 1GBit ", 125_000_000),
        ("32gbit", 4_000_000_000),
    ],
)
def test_link_parses(text, bytes_per_s):
    assert Link.parse(text) == Link(bytes_per_s)


@pytest.mark.parametrize("text", ["none", "NONE", None])
def test_link_none_is_no_link(text):
    assert Link.parse(text) is None


@pytest.mark.parametrize("text", ["", "1", "gbit", "1gb", "1 gbit", "-1gbit", "1gbit/s", "nan", "1e3mbit", "1.gbit"])
def test_link_refuses_other_forms(text):
    with pytest.raises(ValueError, match=r"100kbit.*400mbit.*2\.5gbit.*none") as error:
        Link.parse(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", ["0gbit", "1kbit", "33gbit"])
def test_link_refuses_rates_out_of_range(text):
    with pytest.raises(ValueError, match=f"{text}.*10kbit to 32gbit"):
        Link.parse(text)


def test_link_that_changes():
    link = Link.parse("1gbit, 200mbit@5s,400mbit@7.5s")
    assert link == Link(125_000_000, ((5.0, 25_000_000), (7.5, 50_000_000)))
    assert link.rates == (125_000_000, 25_000_000, 50_000_000)


@pytest.mark.parametrize(
    "text", ["1gbit,200mbit", "1gbit@5s", "1gbit,200mbit@5", "1gbit,none@5s", "1gbit,", "none,1gbit@5s"]
)
def test_link_refuses_changes_that_mean_nothing(text):
    with pytest.raises(ValueError, match=r"not understood.*1gbit,200mbit@5s") as error:
        Link.parse(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", ["1gbit,200mbit@0s", "1gbit,200mbit@5s,1gbit@5s", "1gbit,200mbit@5s,1gbit@3s"])
def test_link_refuses_changes_out_of_order(text):
    with pytest.raises(ValueError, match=f"{text}.*after the one before"):
        Link.parse(text)


@pytest.mark.parametrize("text", ["10kbit", "10mbit", "200mbit", "1gbit", "4gbit", "32gbit"])
def test_bucket_holds_a_packet_of_the_size_that_the_interface_is_told(text):
    link = Link.parse(text)
    assert link is not None
    packet = packet_bytes(link.bytes_per_s)
    assert 1448 < packet <= 3 * 65536
    frames = -(-packet // 1448)
    first, second = bucket(link.bytes_per_s, packet), bucket(link.bytes_per_s, packet, behind_another=True)
    assert packet + 66 * frames <= first.burst < second.burst < second.limit
    assert first.rate == link.bytes_per_s


# ------------------------------------------------------------------------------------------------------- topology


def test_all_packets_of_a_lab_fit_its_slowest_rate():
    """A connection keeps its packet size, so one for a faster rate would never get through the bucket of a slower."""
    slow = packet_bytes(12_500_000)
    for link, uplink in (("1gbit", "100mbit"), ("1gbit,100mbit@5s", "1gbit"), ("1gbit", "1gbit,100mbit@1s,1gbit@2s")):
        topology = Topology.parse(4, link, 2, uplink)
        assert topology is not None
        assert topology.packet_bytes == slow


@pytest.mark.parametrize(("ranks", "nodes", "sizes"), [(4, 2, [2, 2]), (5, 2, [3, 2]), (3, 3, [1, 1, 1]), (4, 1, [4])])
def test_neighbours_share_a_node(ranks, nodes, sizes):
    expected = [(node, place, size) for node, size in enumerate(sizes) for place in range(size)]
    assert [node_of(rank, ranks, nodes) for rank in range(ranks)] == expected


def test_ports_of_two_nodes():
    topology = Topology.parse(3, "4gbit", 2, "1gbit")
    assert topology is not None
    link, uplink = Link(500_000_000), Link(125_000_000)
    assert [(port.rank, port.name, port.link) for port in topology.ports()] == [
        (0, "", link), (None, "p0", link), (1, "", link), (None, "p1", link), (2, "", link), (None, "p2", link),
        (None, "u0", uplink), (None, "d0", uplink), (None, "u1", uplink), (None, "d1", uplink),
    ]  # fmt: skip
    assert Topology.from_json(topology.to_json()) == topology
    assert timeline(topology) == []


def test_changes_come_in_the_order_of_time_at_every_port_of_the_link():
    topology = Topology.parse(2, "4gbit,1gbit@3s", 2, "1gbit,200mbit@2s,1gbit@4s")
    assert topology is not None
    assert Topology.from_json(topology.to_json()) == topology
    changes = [(c.start_s, c.bytes_per_s, c.port.name) for c in timeline(topology)]
    links, uplinks = ("", "p0", "", "p1"), ("u0", "d0", "u1", "d1")
    assert changes == [
        *[(0.0, 500_000_000, name) for name in links],
        *[(0.0, 125_000_000, name) for name in uplinks],
        *[(2.0, 25_000_000, name) for name in uplinks],
        *[(3.0, 125_000_000, name) for name in links],
        *[(4.0, 125_000_000, name) for name in uplinks],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, "1gbit", 0, "1gbit"), "ranks 4 can be on 1 to 4 nodes, not 0"),
        ((4, "1gbit", 5, "1gbit"), "ranks 4 can be on 1 to 4 nodes, not 5"),
        ((4, "1gbit", 2, None), "nodes 2 need a link and an uplink with a rate, not '1gbit' and None"),
        ((4, "none", 2, "1gbit"), "nodes 2 need a link and an uplink with a rate, not 'none' and '1gbit'"),
        ((4, "1gbit", 1, "1gbit"), "uplink '1gbit' goes between nodes, and there is one"),
        ((4, "1gbit", 2, "fast"), "'fast' is not understood"),
    ],
)
def test_nodes_and_uplinks_that_do_not_go_together(arguments, message):
    ranks, link, nodes, uplink = arguments
    with pytest.raises(ValueError, match=message):
        Lab(ranks, link, nodes=nodes, uplink=uplink)


# ------------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize("ranks", [0, -1, 251])
def test_ranks_out_of_range(ranks):
    with pytest.raises(ValueError, match=f"not {ranks}"):
        run_command(ranks, "none", ["true"])


def test_commands_that_cannot_run():
    with pytest.raises(ValueError, match=r"empty: \[\]"):
        run_command(1, "none", [])
    with pytest.raises(ValueError, match="'no-such-program-here'"):
        run_command(1, "none", ["no-such-program-here"])
    with pytest.raises(ValueError, match="'1gb'"):
        run_command(1, "1gb", ["true"])


def test_run_outside_of_with():
    with pytest.raises(RuntimeError, match="with statement"):
        Lab(1, "none").run(["true"])


def test_import_needs_neither_torch_nor_pyroute2():
    code = "import sys, flashoverlap.lab; print({'torch', 'pyroute2'} & set(sys.modules))"
    done = subprocess.run(python(code), env=pythonpath(), capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# --------------------------------------------------------------------------------------------------- plain loopback


def test_variables_are_those_of_torchrun(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # An outer torchrun's: nobody would serve the store.
    with Lab(3, "none") as lab:
        ranks = run_json(lab, python(WHO), env={"MINE": "kept"})
    for rank, seen in enumerate(ranks):
        env = seen["env"]
        for name in ("RANK", "LOCAL_RANK", "ROLE_RANK"):
            assert env[name] == str(rank)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
            assert env[name] == "3"
        for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            assert env[name] == "lo"
        assert env["GROUP_RANK"] == "0"
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert env["MASTER_PORT"] == ranks[0]["env"]["MASTER_PORT"]
        assert env["TORCHELASTIC_RUN_ID"] == lab.run_id
        assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        assert env["OMP_NUM_THREADS"] == "1"
        assert env["MINE"] == "kept"
        assert seen["sid"] == seen["pid"]  # A session of its own.
        assert seen["netns"] == os.readlink("/proc/self/ns/net")


def test_variables_of_several_nodes():
    lab = Lab(3, "1gbit", nodes=2, uplink="100mbit")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [" ".join(env[name] for name in names) for env in lab.environments()] == [
        "0 3 0 2 0 2", "1 3 1 2 0 2", "2 3 0 1 1 2",
    ]  # fmt: skip


def test_env_sets_what_is_the_callers_and_no_more(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with Lab(1, None) as lab:
        assert run_json(lab, python(WHO))[0]["env"]["OMP_NUM_THREADS"] == "3"
        assert run_json(lab, python(WHO), env={"OMP_NUM_THREADS": "2"})[0]["env"]["OMP_NUM_THREADS"] == "2"
        with pytest.raises(ValueError, match="MASTER_PORT, RANK"):
            lab.run(["true"], env={"RANK": "0", "MASTER_PORT": "1"})


@pytest.mark.parametrize("prefix", [True, False])
def test_lines_come_whole_and_with_their_rank(prefix):
    script = (
        'for i in 1 2 3; do printf "out %s " $i; sleep 0.02; echo "of $RANK"; echo "err $RANK" >&2; done; printf end'
    )
    out, err = io.StringIO(), io.StringIO()
    with Lab(2, "none") as lab:
        lab.run(["sh", "-c", script], stdout=out, stderr=err, prefix=prefix)
    marks = [f"[rank {rank}] " if prefix else "" for rank in range(2)]
    expected_out = [f"{marks[r]}out {i} of {r}" for r in range(2) for i in (1, 2, 3)] + [f"{m}end" for m in marks]
    assert sorted(out.getvalue().splitlines()) == sorted(expected_out)
    assert sorted(err.getvalue().splitlines()) == sorted(f"{marks[r]}err {r}" for r in range(2) for _ in range(3))


# ---------------------------------------------------------------------------------------------------------- failures


def test_a_failing_rank_fails_the_run_and_ends_the_others(capsys, tmp_path):
    pids = tmp_path / "pids"
    script = f'echo $$ >> {pids}; if [ $RANK = 1 ]; then echo "why it failed" >&2; exit 3; fi; sleep 600'
    assert run_command(3, "none", ["sh", "-c", script]) == 3
    _, err = capsys.readouterr()
    assert "[rank 1] why it failed" in err
    assert "flashoverlap lab: rank 1 of 3 failed with exit code 3; ranks [0, 2] were ended" in err
    assert err.rstrip().endswith("last output of rank 1:\nwhy it failed")
    assert len(pids.read_text().split()) == 3
    assert not [pid for pid in pids.read_text().split() if Path("/proc", pid).exists()]


def test_the_others_may_still_say_what_they_saw():
    script = 'if [ $RANK = 0 ]; then exit 7; fi; trap "" TERM; sleep 0.5; echo "peer is gone"; exit 1'
    out = io.StringIO()
    with (
        Lab(2, "none") as lab,
        pytest.raises(LabError, match=r"rank 0 of 2 .* code 7; ranks \[1\] failed too") as error,
    ):
        lab.run(["sh", "-c", script], stdout=out)
    assert out.getvalue() == "[rank 1] peer is gone\n"
    assert (error.value.rank, error.value.exit_code, error.value.exit_status) == (0, 7, 7)


def test_death_by_signal_is_named():
    with Lab(1, "none") as lab, pytest.raises(LabError, match="rank 0 of 1 died of SIGKILL") as error:
        lab.run(["sh", "-c", "kill -9 $$"])
    assert (error.value.exit_code, error.value.exit_status) == (-9, 137)


def test_timeout_ends_all_by_force_where_needed(tmp_path):
    script = f'trap "" TERM; echo $$ >> {tmp_path}/pids; while :; do sleep 1; done'
    with Lab(2, "none") as lab, pytest.raises(LabError, match=r"ranks \[0, 1\] of 2 still ran after 0.3 s"):
        lab.run(["sh", "-c", script], timeout_s=0.3)
    assert not [pid for pid in (tmp_path / "pids").read_text().split() if Path("/proc", pid).exists()]


def test_what_a_rank_leaves_in_its_session_is_ended():
    with Lab(1, "none") as lab:
        result = lab.run(["sh", "-c", "sleep 600 & echo $!"], stdout=io.StringIO(), timeout_s=30)
    wait_until(lambda: not alive(int(result.tails[0])))


# ---------------------------------------------------------------------------------------------------------- namespaces


def test_each_rank_has_a_network_of_its_own(namespaces):
    with Lab(3, "1gbit") as lab:
        ranks = run_json(lab, python(WHO))
    assert len({rank["netns"] for rank in ranks} | {os.readlink("/proc/self/ns/net")}) == 4
    for rank in ranks:
        assert set(rank["interfaces"]) == {"lo", lab.interface}
        assert lab.run_id in lab.interface
        assert rank["env"]["GLOO_SOCKET_IFNAME"] == rank["env"]["NCCL_SOCKET_IFNAME"] == lab.interface
        assert rank["env"]["MASTER_ADDR"] == "10.77.0.1"
        assert rank["uid"] == os.getuid()


@pytest.mark.parametrize("senders", [[0], [1], [0, 1]])
def test_rate_holds_in_each_direction_and_both_at_once(namespaces, senders):
    rate = 25_000_000
    with Lab(2, "200mbit") as lab:
        ranks = run_json(lab, python(TRAFFIC, json.dumps(senders), "1.2"))
    for rank in ranks:
        if 1 - rank["rank"] in senders:
            assert 0.5 * rate <= rank["bytes_per_s"] <= 1.15 * rate
        else:
            assert rank["bytes_per_s"] == 0


def test_ranks_of_a_node_share_its_uplink_and_have_their_links_to_themselves(namespaces):
    link, uplink = 25_000_000, 12_500_000
    with Lab(4, "200mbit", nodes=2, uplink="100mbit") as lab:
        inside = run_json(lab, python(FLOWS, "[1, 0, 3, 2]", "1.0"))
        between = run_json(lab, python(FLOWS, "[2, 3, 0, 1]", "1.5"))
    for tenths in inside:
        assert 0.5 * link <= sum(tenths[1:9]) / 8 <= 1.15 * link
    # How two flows share a port is up to them; together they have its rate, in each direction.
    for first, second in (between[:2], between[2:]):
        assert 0.35 * uplink <= sum(first[1:9] + second[1:9]) / 8 <= 1.15 * uplink


def test_one_flow_between_nodes_has_the_whole_uplink(namespaces):
    with Lab(4, "200mbit", nodes=2, uplink="100mbit") as lab:
        ranks = run_json(lab, python(FLOWS, "[2, -1, -1, -1]", "1.0"))
    assert 0.5 * 12_500_000 <= sum(ranks[2][1:9]) / 8 <= 1.15 * 12_500_000
    assert sum(map(sum, (ranks[0], ranks[1], ranks[3]))) == 0


def test_a_link_changes_during_each_run(namespaces):
    with Lab(2, "400mbit,100mbit@1.5s") as lab:
        for _ in range(2):
            tenths = run_json(lab, python(FLOWS, "[1, 0]", "3.0"))[0]
            assert 2.5 <= sum(tenths[1:3]) / sum(tenths[7:9]) <= 6.0, tenths
            assert 0.5 * 12_500_000 <= sum(tenths[7:9]) / 2 <= 1.2 * 12_500_000


def test_a_change_that_the_kernel_refuses_fails_the_run(namespaces, monkeypatch):
    with Lab(1, "400mbit,100mbit@2s") as lab:
        monkeypatch.setattr(lab, "run_id", "unheard")  # an interface that is not there
        with pytest.raises(LabError, match="the links could not be changed: RefusedError: setting a token bucket"):
            lab.run(python(WHO), stdout=io.StringIO())


def test_two_labs_at_once_share_nothing(namespaces):
    found: dict[str, list[dict]] = {}

    def work(link: str) -> None:
        with Lab(2, link) as lab:
            found[link] = run_json(lab, python(TRAFFIC, "[0, 1]", "1.0"))

    threads = [threading.Thread(target=work, args=(link,)) for link in ("100mbit", "200mbit")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for link, rate in (("100mbit", 12_500_000), ("200mbit", 25_000_000)):
        for rank in found[link]:
            assert 0.5 * rate <= rank["bytes_per_s"] <= 1.15 * rate


def test_a_lab_runs_several_commands(namespaces):
    with Lab(2, "1gbit") as lab:
        first, second = (run_json(lab, python(WHO)) for _ in range(2))
    assert [rank["netns"] for rank in first] == [rank["netns"] for rank in second]
    assert first[0]["env"]["MASTER_PORT"] != second[0]["env"]["MASTER_PORT"]


def test_gloo_reaches_the_other_rank(namespaces):
    pytest.importorskip("torch")
    with Lab(2, "1gbit") as lab:
        result = lab.run(python(ALL_REDUCE), stdout=io.StringIO(), timeout_s=90)
    assert [tail.splitlines()[-1] for tail in result.tails] == ["[3.0]"] * 2


# ------------------------------------------------------------------------------------------------- nothing left behind


def alive(pid: int) -> bool:
    """Whether a process runs, zombies aside."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_in(netns: str) -> list[str]:
    """The processes that are inside a network namespace or hold a descriptor of it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [os.readlink(process / "ns/net"), *(os.readlink(fd) for fd in (process / "fd").iterdir())]
        except OSError:
            continue
        if netns in links:
            found.append(process.name)
    return found


def wait_until(true, timeout_s: float = 15.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s, "did not come true in time"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_an_ended_lab_leaves_nothing(namespaces, number, status):
    interfaces = socket.if_nameindex()
    rank = python(WHO + "import sys, time; sys.stdout.flush(); time.sleep(600)")
    code = f"import sys; from flashoverlap.lab import run_command; sys.exit(run_command(2, '1gbit', {rank!r}))"
    with subprocess.Popen(python(code), env=pythonpath(), stdout=subprocess.PIPE, text=True) as lab:
        assert lab.stdout is not None
        ranks = [json.loads(lab.stdout.readline().partition("] ")[2]) for _ in range(2)]
        assert all(alive(rank["pid"]) for rank in ranks)
        assert all(processes_in(rank["netns"]) for rank in ranks)
        lab.send_signal(number)
        assert lab.wait(timeout=30) == status
    wait_until(lambda: not any(alive(rank["pid"]) for rank in ranks))
    assert not any(processes_in(rank["netns"]) for rank in ranks)
    assert socket.if_nameindex() == interfaces


def _unprivileged_python() -> str | None:
    """An interpreter that user 65534 may run with this library in reach."""
    for executable in dict.fromkeys(filter(None, (sys.executable, shutil.which("python3", path="/usr/bin:/bin")))):
        try:
            done = subprocess.run(
                [executable, "-B", "-c", "import os, pyroute2, flashoverlap.lab; os.listdir(os.path.dirname(os.__file__))"],
                env=_unprivileged_env(), user=65534, group=65534, extra_groups=[], cwd="/", capture_output=True,
            )  # fmt: skip
        except PermissionError:
            continue
        if done.returncode == 0:
            return executable
    return None


def _unprivileged_env() -> dict[str, str]:
    pyroute2 = pytest.importorskip("pyroute2")
    return pythonpath(Path(pyroute2.__file__).parents[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="already without root: the other tests show it")
def test_needs_no_root():
    executable = _unprivileged_python()
    if executable is None:
        pytest.skip("user 65534 may not read this interpreter or this library")
    code = f"""
import io, json, sys
from flashoverlap.lab import Lab, lab_unavailable
reason = lab_unavailable()
if reason:
    sys.exit("unavailable: " + reason)
with Lab(2, "200mbit,100mbit@60s") as lab:
    for command in ([{WHO!r}], [{TRAFFIC!r}, "[0, 1]", "0.8"]):
        result = lab.run([sys.executable, "-c", *command], stdout=io.StringIO(), timeout_s=60)
        print(json.dumps([json.loads(tail) for tail in result.tails]))
"""
    done = subprocess.run(
        [executable, "-B", "-c", code], env=_unprivileged_env(), cwd="/",
        user=65534, group=65534, extra_groups=[], capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    if "unavailable: " in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    who, traffic = map(json.loads, done.stdout.splitlines())
    assert [rank["uid"] for rank in who] == [65534] * 2
    assert len({rank["netns"] for rank in who}) == 2
    assert all(0.5 * 25e6 <= rank["bytes_per_s"] <= 1.15 * 25e6 for rank in traffic)
