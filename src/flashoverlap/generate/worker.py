"""One rank of a generation: ``python -m flashoverlap.generate.worker DIRECTORY``, with torchrun's variables.

Reads ``task.json`` in the directory. Rank 0 prints each token as it comes, a line of JSON each, and leaves
``result.json`` there. What cannot work is told by every rank, in ``refused.<rank>`` and on standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import flashoverlap.torch as fo

from .decode import Generated, forward, generate
from .load import load
from .options import Sampling

Result = TypeVar("Result")
REFUSED = 2  # exit status


@dataclass(frozen=True)
class Task:
    """What the ranks do.

    Args:
        checkpoint: folder of the model.
        prompt: tokens.
        tokens: how many to generate at most.
        end_tokens: any of them is the last.
        sampling: how each is chosen.
        dtype: of the parameters.
        overlap: mode of :class:`flashoverlap.Overlap`.
    """

    checkpoint: str
    prompt: list[int]
    tokens: int
    end_tokens: list[int]
    sampling: Sampling
    dtype: str
    overlap: str

    @staticmethod
    def from_json(text: str) -> Task:
        """Reads what run.py wrote."""
        fields: dict[str, Any] = json.loads(text)
        return Task(**{**fields, "sampling": Sampling(**fields["sampling"])})


class RefusedError(ValueError):
    """Something cannot work, and all ranks know."""


def main(directory: Path) -> int:
    """Runs this rank; returns its exit status."""
    task = Task.from_json((directory / "task.json").read_text(encoding="utf-8"))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        made = _run(task, dist.new_group(backend="gloo"))
        if rank == 0:
            (directory / "result.json").write_text(json.dumps(asdict(made)), encoding="utf-8")
        return 0
    except RefusedError as error:
        (directory / f"refused.{rank}").write_text(str(error), encoding="utf-8")
        print(f"flashoverlap generate: {error}", file=sys.stderr)
        return REFUSED
    finally:
        dist.destroy_process_group()


def _run(task: Task, control: Any) -> Generated:
    """Loads and generates; the times are the slowest rank's."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    dtype = getattr(torch, task.dtype)
    model = together(control, lambda: load(Path(task.checkpoint), mesh, dtype, fo.Overlap(task.overlap)))
    with torch.inference_mode():
        forward(model, task.prompt[:1], 0, None)  # connects the ranks, so that prefill is not charged for it
    dist.barrier(group=control)
    show = _print_token if dist.get_rank() == 0 else lambda token: None
    try:
        made = generate(model, task.prompt, task.tokens, task.sampling, task.end_tokens, show)
    except ValueError as error:  # of the logits, which are the same on every rank
        raise RefusedError(str(error)) from None
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (made.tokens, made.prefill_s, made.decode_s), group=control)
    if any(tokens != made.tokens for tokens, _, _ in everyone):
        raise RuntimeError(f"the ranks generated different tokens: {[tokens for tokens, _, _ in everyone]}")
    made.prefill_s = max(prefill_s for _, prefill_s, _ in everyone)
    made.decode_s = max(decode_s for _, _, decode_s in everyone)
    return made


def together(control: Any, step: Callable[[], Result]) -> Result:
    """The result of a step that may be refused on any rank.

    Raises:
        RefusedError: on every rank with the words of the first that refused, so that none waits for another.
    """
    result, refusal = None, None
    try:
        result = step()
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        refusal = " ".join(str(error).split())
    everyone: list[str | None] = [None] * dist.get_world_size(control)
    dist.all_gather_object(everyone, refusal, group=control)
    for words in everyone:
        if words is not None:
            raise RefusedError(words)
    return result  # pyright: ignore[reportReturnType]


def _print_token(token: int) -> None:
    print(json.dumps({"token": token}), flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
