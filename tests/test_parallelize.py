"""Parallelized models beside one process, on real ranks: see model_ranks.py."""

import pytest

import model_ranks

MODULES = ("model_cases", "plan_cases", "reading_cases", "mesh_cases")
CASES = [(module, case) for module in MODULES for case in model_ranks.cases(module)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("module", "case"), CASES)
def test_case(world_size, module, case):
    model_ranks.check(world_size, module, case)
