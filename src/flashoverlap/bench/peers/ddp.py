"""torch's DistributedDataParallel: gradients averaged bucket by bucket during backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ..contestant import Contestant
from ..data_parallel import Steps

_TUNED = {"bucket_cap_mb": 8, "gradient_as_bucket_view": True}


class Ddp(Steps):
    """As by default, or with small buckets of which gradients are views."""

    def __init__(self, case: Any, group: Any, variant: str = "") -> None:
        model = copy.deepcopy(case.model)
        settings: dict[str, Any] = _TUNED if "8 MB" in variant else {}
        super().__init__(case, model, DistributedDataParallel(model, process_group=group, **settings), variant)


CONTESTANTS: dict[str, Callable[..., Contestant]] = {"dp": Ddp, "dp_llm": Ddp}
