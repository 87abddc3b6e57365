"""Parallelized models beside one process, on real ranks: see model_ranks.py."""

import pytest

import model_ranks

CASES = [
    (module, case) for module in ("model_cases", "plan_cases", "reading_cases") for case in model_ranks.cases(module)
]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("module", "case"), CASES)
def test_case(world_size, module, case):
    model_ranks.check(world_size, module, case)
