"""What holds for all tests: no group is measured unasked, which takes a second and writes to the user's cache; and
no call is too small to overlap, as those of tests are."""

import pytest

from flashoverlap import choice
from flashoverlap.torch.planned import Planned


@pytest.fixture(autouse=True)
def _unmeasured(monkeypatch):
    monkeypatch.setattr(Planned, "measures", False)
    monkeypatch.setattr(choice, "WORTH_BYTES", 0)
