"""Machines in files: every bit comes back, and what is broken or of another place is told."""

import json
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashoverlap import Kernel, Link, Machine
from flashoverlap.machine_file import VERSION, place, read, write
from flashoverlap.matmul import Attention, Matmul, Product

MATMUL = Matmul(1.25e11, 2e-6, 1e10, ((8, 256, 256, 0.1), (512, 256, 256, 0.9)), 3e-10, (1.25, 1.5), 512)
MACHINE = Machine(
    Link(1.1e-4, 1.19e8, ((1024, 1e-4), (1 << 20, 8.9e-3)), 200_000),
    {
        "mm": Kernel(1e-6, 1 / 3, (Product(MATMUL, 512, 256, 2, True),)),
        "down": Kernel(attention=Attention(MATMUL, 256, 512, True)),
    },
    add=Kernel(0.0, 0.1),
    contention=0.03,
    issue_s=2e-5,
    collective_efficiency=0.61,
    matmul=MATMUL,
    nodes=(2, 1),
    uplink=Link(2e-4, 1e7),
    links=(Link(0.0, float("inf")), Link(0.1, 1.0), Link(0.2, 3.0)),
)
ABOUT = {"host": "here", "ranks": 3, "hosts": [2, 1]}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "machine.json"


def test_every_field_comes_back(path):
    write(path, MACHINE, ABOUT)
    assert read(path) == read(path, {"host": "here", "hosts": [2, 1]}) == MACHINE
    assert hash(read(path)) == hash(MACHINE)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@given(st.lists(st.floats(0, 1e300, exclude_min=True), min_size=5, max_size=5))
@settings(max_examples=30, deadline=None)
def test_numbers_come_back_bit_by_bit(tmp_path_factory, numbers):
    path = tmp_path_factory.mktemp("machine") / "machine.json"
    machine = Machine(
        Link(numbers[0], numbers[1]), issue_s=numbers[2], contention=numbers[3], matmul=Matmul(numbers[4])
    )
    write(path, machine, {})
    assert read(path) == machine


def test_where_a_machine_holds_is_what_was_written(path):
    write(path, MACHINE, ABOUT)
    assert place(path) == ABOUT
    path.write_text(json.dumps({**json.loads(path.read_text()), "about": ["here"]}))
    assert place(path) == {}
    path.write_text("{}")
    with pytest.raises(ValueError, match=f"machine file {path}: it is none of a machine"):
        place(path)


def test_a_file_of_another_place_says_in_what_it_differs(path):
    write(path, MACHINE, ABOUT)
    with pytest.raises(
        ValueError, match=rf"{path}: it was measured elsewhere: host 'here', not 'there', torch None, not '2'"
    ):
        read(path, {"ranks": 3, "host": "there", "torch": "2"})


def changed(change):
    """The text of a file whose content has gone through ``change``."""

    def text(path):
        content = json.loads(path.read_text())
        change(content)
        return json.dumps(content)

    return text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lambda path: path.read_text()[:-40], "line"),
        (lambda _: "", "Expecting value"),
        (lambda _: "[1, 2]", "it is none of a machine"),
        (lambda _: "[" * 200_000 + "]" * 200_000, "it is nested too deeply"),
        (lambda path: path.read_text().replace("2e-05", "1" + "0" * 400), "too large"),
        (lambda _: '{"schema": 1}', "it is none of a machine"),
        (changed(lambda c: c.update(version=1)), "it has version 1, and 3 can be read"),
        (changed(lambda c: c.pop("version")), "it has version None, and 3 can be read"),
        (changed(lambda c: c.pop("machine")), "machine cannot be None"),
        (changed(lambda c: c["machine"].pop("link")), "machine lacks link"),
        (changed(lambda c: c["machine"].update(colour=1)), "machine has colour, which is not known"),
        (changed(lambda c: c["machine"]["link"].update(bytes_per_s=0.0)), "bytes_per_s must be a number above 0, not 0.0"),
        (changed(lambda c: c["machine"]["link"].update(latency_s=-1)), "latency_s must be a finite number of 0 or more"),
        (changed(lambda c: c["machine"]["link"].update(latency_s=float("nan"))), "latency_s must be a finite number of 0 or more, not nan"),
        (changed(lambda c: c["machine"].update(ports=1.5)), "machine.ports cannot be 1.5"),
        (changed(lambda c: c["machine"].update(issue_s="soon")), "machine.issue_s cannot be 'soon'"),
        (changed(lambda c: c["machine"].update(issue_s=True)), "machine.issue_s cannot be True"),
        (changed(lambda c: c["machine"]["link"]["sizes"][0].append(3)), r"machine.link.sizes\[0\] cannot be \[1024, 0.0001, 3\]"),
        (changed(lambda c: c["machine"]["kernels"].update(mm=3)), "machine.kernels.mm cannot be 3"),
        (changed(lambda c: c["machine"]["matmul"]["efficiency"].append([8, 9, 9, 1.0])), "efficiency needs one point for each"),
    ],
)  # fmt: skip
def test_a_broken_file_says_what_is_wrong(path, text, message):
    write(path, MACHINE, ABOUT)
    path.write_text(text(path))
    with pytest.raises(ValueError, match=f"machine file {path}: .*{message}"):
        read(path)


def test_a_new_number_of_a_machine_is_a_new_version():
    """Of what version 3 holds; whoever changes it raises VERSION, and names here what the new one holds."""
    numbers = {
        kind: [field.name for field in fields(kind)] for kind in (Machine, Link, Kernel, Matmul, Product, Attention)
    }
    assert (VERSION, numbers) == (
        3,
        {
            Machine: ["link", "kernels", "add", "ports", "contention", "issue_s", "post_s", "notice_s", "collective_efficiency", "collective_fixed_s", "matmul", "nodes", "uplink", "links"],
            Link: ["latency_s", "bytes_per_s", "sizes", "burst_bytes"],
            Kernel: ["fixed_s", "seconds_per_row", "products", "attention"],
            Matmul: ["flops_per_s", "fixed_s", "memory_bytes_per_s", "efficiency", "activation_s", "attention", "keys_at_once"],
            Product: ["matmul", "k", "n", "itemsize", "summed", "turned"],
            Attention: ["matmul", "features", "keys", "causal", "backward", "itemsize"],
        },
    )  # fmt: skip


def test_bytes_that_are_no_text(path):
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=f"machine file {path}"):
        read(path)


def test_a_file_that_cannot_be_written_leaves_nothing(path):
    path.mkdir()
    with pytest.raises(OSError, match=r"machine\.json"):
        write(path, MACHINE, ABOUT)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
