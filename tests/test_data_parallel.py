"""data_parallel against one process on the joint batch, in processes of its own."""

import pytest

import model_ranks

MODULES = ("data_parallel_cases", "data_parallel_models")
CASES = [(module, case) for module in MODULES for case in model_ranks.cases(module)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("module", "case"), CASES)
def test_case(world_size, module, case):
    model_ranks.check(world_size, module, case)


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (3, "case_a_full_window_and_ranks_that_leave_something_out"),
        (2, "case_bytes_in_flight_are_bounded"),
        (4, "case_bytes_in_flight_are_bounded"),
        (2, "case_peak_memory_is_that_of_fsdp2"),
        (4, "case_peak_memory_is_that_of_fsdp2"),
    ],
)
def test_memory(world_size, case):
    model_ranks.check(world_size, "data_parallel_memory", case)


@pytest.mark.parametrize(
    ("world_size", "case"),
    [(4, "case_two_ranks_write_what_four_and_one_go_on_with"), (8, "case_replicas_sequences_and_features")],
)
def test_meshes(world_size, case):
    model_ranks.check(world_size, "data_parallel_meshes", case)
