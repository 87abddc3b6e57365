"""data_parallel against one process on the joint batch, in processes of its own."""

import pytest
from torch import nn

import model_ranks
from flashoverlap import Overlap
from flashoverlap.torch.data_parallel.apply import splits_of
from flashoverlap.torch.data_parallel.unit import Member

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


@pytest.mark.parametrize(
    ("shape", "ranks", "first", "parts"),
    [
        ((1024, 1024), 2, True, 4),  # half a megabyte each
        ((1024, 1024), 2, False, 1),  # its 512 rows are not cut
        ((2048, 512), 2, False, 2),
        ((8192, 512), 2, False, 4),  # no more
        ((256, 256), 2, True, 1),
        ((256, 256), 4, False, 2),
        ((1, 256), 4, False, 1),  # a row at the least
    ],
)
def test_only_the_first_weight_is_cut_finely(shape, ranks, first, parts):
    layer = nn.Linear(shape[1], shape[0], bias=False)
    member = Member("weight", layer.weight, [(layer, "weight")], ranks)
    assert splits_of(member, ranks, Overlap(), first) == parts
    assert splits_of(member, ranks, Overlap("flash", splits=3), first) == min(3, max(member.rows))
