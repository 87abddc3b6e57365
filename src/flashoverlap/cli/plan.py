"""``flashoverlap plan``: what a step, an operator or the paper's MLP takes on machines that need not be there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from json import dumps
from typing import Any

from ..arguments import check_writable, taking
from .common import refused
from .plan_options import DTYPES, PlanOptions

Answer = tuple[list[Any], dict[str, Any]]  # what is printed, and what is written


@taking(PlanOptions)
def plan(**chosen: Any) -> None:
    """Say what a training step takes on a cluster, and why: by simulating the schedules that calls would run.

    Pipeline parallelism is not planned for.
    """
    try:
        options = PlanOptions(**chosen)
        if options.json is not None:
            check_writable(options.json)
        answer, result = _ANSWERS[options.question](options)
    except (ValueError, OSError) as error:
        raise refused("plan", error) from None
    _print(answer)
    if options.json is not None:
        options.json.write_text(dumps(result, indent=1) + "\n", encoding="utf-8")


def _print(answer: list[Any]) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 180)
    for part in answer:
        console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))


def _model(options: PlanOptions) -> Answer:
    from ..cluster.split import Split
    from ..cluster.step import estimate
    from .plan_tables import step

    model, cluster, work = _setting(options)
    found = estimate(model, cluster, Split(options.get("dp"), options.get("up"), options.get("tp")), work)
    return step(found), found.as_json()


def _sweep(options: PlanOptions) -> Answer:
    from ..cluster.sweep import sweep
    from .plan_tables import splits

    assert options.devices
    model, cluster, work = _setting(options)
    found = sweep(model, cluster, options.devices, work, options.global_batch)
    return splits(found), found.as_json()


def _setting(options: PlanOptions) -> tuple[Any, Any, Any]:
    """The model, the cluster, and what is trained."""
    from ..cluster.configuration import model_shape
    from ..cluster.memory import Training

    assert options.model
    cluster, dtype = _cluster(options)
    work = Training(
        options.get("seq"),
        options.get("batch"),
        dtype,
        options.get("shard"),
        options.get("accumulate"),
        options.recompute,
    )
    return model_shape(options.model), cluster, work


def _cluster(options: PlanOptions) -> tuple[Any, str]:
    """The cluster, and the dtype."""
    from ..cluster.find import find_cluster, usual_dtype

    assert options.machine
    dtype = DTYPES[options.dtype] if options.dtype else usual_dtype(options.machine)
    return find_cluster(options.machine, dtype, options.memory and options.memory * 1e9), dtype


def _op(options: PlanOptions) -> Answer:
    from ..plan import plan
    from .plan_tables import operator, operator_json

    assert options.op
    assert options.ranks
    cluster, dtype = _cluster(options)
    found = plan(options.op, options.sizes(), cluster.group(options.ranks), ranks=options.ranks, dtype=dtype)
    return operator(found, cluster), operator_json(found, cluster)


def _paper(_: PlanOptions) -> Answer:
    from ..cluster.paper import reproduce
    from .plan_tables import paper

    found = reproduce()
    return paper(found), found.as_json()


_ANSWERS: dict[str, Callable[[PlanOptions], Answer]] = {"model": _model, "sweep": _sweep, "op": _op, "paper": _paper}
