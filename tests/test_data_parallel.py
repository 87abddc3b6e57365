"""data_parallel against one process on the joint batch, in processes of its own."""

import pytest

import model_ranks

MODULES = ("data_parallel_cases", "data_parallel_models")
CASES = [(module, case) for module in MODULES for case in model_ranks.cases(module)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("module", "case"), CASES)
def test_case(world_size, module, case):
    model_ranks.check(world_size, module, case)
