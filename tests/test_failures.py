"""What real processes do when one of them dies, stalls or leaves (processes.py says what each case is)."""

import json
import signal

import pytest

import processes

DEATHS = {
    "dies_first": 7,
    "killed_first": -signal.SIGKILL,
    "dies_while_connecting": 7,
    "dies_between": 7,
    "dies_in_flight": 7,
    "killed_in_ring": -signal.SIGKILL,
    "dies_in_collective": 7,
    "dies_before_backward": 7,
    "dies_in_backward": 7,
    "raises": 1,
    "raises_in_flight": 1,
}
STALLS = ["stalls_first", "stalls", "stalls_in_flight"]
PEACEFUL = [
    "leaves",
    "leaves_tidily",
    "leaves_in_flight",
    "begins_anew",
    "subgroups",
    "checked_backend",
    "on_device_transport",
]


@pytest.fixture(scope="module")
def ended():
    return processes.run_cases([*DEATHS, *STALLS])


@pytest.fixture(scope="module")
def ended_in_peace():
    return processes.run_cases(PEACEFUL)


def check_survivor(rank, within_s):
    assert "terminate called" not in rank.text
    seconds, kind, message = rank.said("raised").split(maxsplit=2)
    assert kind == "PeerError"
    assert message.startswith("linear_reduce_scatter: ")
    assert "rank 1" in message
    assert float(seconds) < within_s
    assert rank.status == 1
    assert rank.said("threads") == "[]"
    assert rank.end_s - float(rank.said("leaving")) < processes.TIMEOUT_S


@pytest.mark.parametrize("case", DEATHS)
def test_survivors_of_a_death_name_the_dead_well_before_the_time_out(ended, case):
    first, dead, last = ended[case]
    assert dead.status == DEATHS[case]
    check_survivor(first, processes.TIMEOUT_S - 1)
    check_survivor(last, processes.TIMEOUT_S - 1)


@pytest.mark.parametrize("case", STALLS)
def test_a_stalled_rank_is_named_when_the_time_is_out(ended, case):
    first, _, last = ended[case]
    check_survivor(first, processes.TIMEOUT_S + 2)
    check_survivor(last, processes.TIMEOUT_S + 2)


@pytest.mark.parametrize("case", PEACEFUL)
def test_ranks_end_well_and_in_silence(ended_in_peace, case):
    for rank in ended_in_peace[case]:
        assert rank.status == 0, rank.text
        assert "Error" not in rank.text
        assert "terminate called" not in rank.text


def test_nothing_is_left_of_a_group_that_was_destroyed(ended_in_peace):
    for rank in ended_in_peace["begins_anew"]:
        counts = json.loads(rank.said("threads"))
        assert [ours for ours, _ in counts] == [0] * 5
        assert counts[-1] == counts[1], "threads grow"
