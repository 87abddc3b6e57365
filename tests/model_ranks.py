"""Ranks as real processes for parallelized models, which need registered groups: all cases of a number of ranks in one run.

``outcomes(world_size, module)`` forks that many ranks once, calls every ``case_*`` function of ``module`` in each with a
mesh of its own, and returns {case: [what went wrong on rank 0, ...]}, "" where nothing did.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path

TIMEOUT_S = 60.0


@cache
def outcomes(world_size, module, limit_s=110.0):
    command = [sys.executable, __file__, str(world_size), module]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as run:
        try:
            said, errors = run.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            said, errors = "", f"did not end in {limit_s} s"
    if run.returncode == 0:
        return json.loads(said.splitlines()[-1])
    return {case: [f"the run failed: {errors[-4000:]}"] for case in cases(module)}


def cases(module):
    """Names of the cases, without loading what they need."""
    text = (Path(__file__).parent / f"{module}.py").read_text()
    return [line[4 : line.index("(")] for line in text.splitlines() if line.startswith("def case_")]


def check(world_size, module, case):
    """For a test: fails with what each rank said."""
    said = outcomes(world_size, module)[case]
    assert not any(said), "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)


def _rank(rank, world_size, module, directory):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from flashoverlap.torch.planned import Planned

    torch.set_num_threads(1)
    Planned.measures = False  # as conftest.py has it
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT_S))
    said = {}
    for case in cases(module):
        mesh = DeviceMesh.from_group(
            dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)), "cpu", mesh_dim_names=("tp",)
        )
        torch.manual_seed(0)
        print(rank, case, file=sys.stderr, flush=True)
        try:
            getattr(import_module(module), case)(mesh)
            said[case] = ""
        except BaseException:
            said[case] = traceback.format_exc()
        dist.barrier()
    Path(directory, f"{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


def main(world_size, module):
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import_module(module)  # once, before the ranks are forked
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for rank in range(world_size):
            child = os.fork()
            if not child:
                status = 1
                try:
                    _rank(rank, world_size, module, directory)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        assert not any(statuses), statuses
        said = [json.loads(Path(directory, f"{rank}.json").read_text()) for rank in range(world_size)]
    print(json.dumps({case: [each[case] for each in said] for case in said[0]}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
