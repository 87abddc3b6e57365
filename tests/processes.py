"""Ranks as real processes, for what threads cannot show: death, time-outs, leaving the interpreter, registered groups.

`run_cases(names)` runs cases of this file, a few at once, and returns for each what became of its ranks. The ranks are
forked from one process that has loaded torch, and end as any Python program does.
"""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

TIMEOUT_S = 6.0
PROGRESS_S = 60.0
AT_ONCE = 3  # cases; more would keep each other from ending in time on two cores


class Rank(NamedTuple):
    """How a rank ended: its exit status (negative: the signal), when, and all that it wrote."""

    status: int
    end_s: float
    text: str

    def said(self, word):
        """The rest of the last line that begins with ``word``."""
        return [line.removeprefix(word).strip() for line in self.text.splitlines() if line.startswith(word)][-1]


def run_cases(names):
    """{case: [Rank, ...]}"""
    done = subprocess.run([sys.executable, __file__, *names], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return {case: [Rank(*rank) for rank in ranks] for case, ranks in json.loads(done.stdout).items()}


# --- inside a rank ----------------------------------------------------------------------------------------------------


def call(rank=0, *, rows=12, features=8, out=16, grad=False, group=None, **options):
    """One linear_reduce_scatter with the right answer checked: every rank's x and weight are ones."""
    x = torch.ones(rows, features, requires_grad=grad)
    weight = torch.ones(out, features, requires_grad=grad)
    z = fo.linear_reduce_scatter(x, weight, group=group or dist.group.WORLD, **options)
    assert bool((z == features * dist.get_world_size(group)).all())
    return z


def die_at_post(number, how=lambda: os._exit(7)):
    """From now on this rank dies as soon as it has posted its ``number``-th exchange."""
    from flashoverlap.torch.gloo import Gloo

    post, left = Gloo.post, [number]

    def last_post(self, *arguments):
        tickets = post(self, *arguments)
        left[0] -= 1
        if left[0] == 0:
            how()
        return tickets

    Gloo.post = last_post


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def survive(attempt):
    """Says what error the attempt ended in, waits until none of our threads is left, and ends as the error would."""
    begin = time.monotonic()
    try:
        attempt()
    except Exception as error:
        print("raised", round(time.monotonic() - begin, 3), type(error).__name__, error)
        while ours() and time.monotonic() < begin + 2 * TIMEOUT_S:
            time.sleep(0.05)
        print("threads", ours())
        print("leaving", time.monotonic())
        raise
    print("raised nothing")


def ours():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flashoverlap")]


BIG = {"rows": 3 * 4096, "features": 8, "out": 2048}  # 32 MiB a piece, and next to nothing to compute


def dies_first(rank):
    os._exit(7) if rank == 1 else survive(call)


def killed_first(rank):
    kill() if rank == 1 else survive(call)


def dies_while_connecting(rank):
    if rank == 1:
        from flashoverlap.torch import rendezvous

        rendezvous.PrefixStore = lambda *_: os._exit(7)
    survive(call)


def dies_between(rank):
    call()
    os._exit(7) if rank == 1 else survive(call)


def dies_in_flight(rank, **options):
    call()
    dist.barrier()
    if rank == 1:
        die_at_post(1)
    survive(lambda: call(**BIG, **options))


def killed_in_ring(rank):
    call()
    dist.barrier()
    if rank == 1:
        die_at_post(2, kill)
    survive(lambda: call(**BIG, overlap=fo.Overlap(mode="flash", pattern="ring", splits=2)))


def dies_in_collective(rank):
    from flashoverlap.torch import gloo

    call()
    dist.barrier()
    if rank == 1:
        gloo.COLLECTIVES["reduce_scatter"] = lambda *_: os._exit(7)
    survive(lambda: call(**BIG, overlap=fo.Overlap(mode="collective")))


def dies_before_backward(rank):
    z = call(grad=True)
    os._exit(7) if rank == 1 else survive(z.sum().backward)


def dies_in_backward(rank):
    z = call(**BIG, grad=True)
    dist.barrier()
    if rank == 1:
        die_at_post(1)
    survive(z.sum().backward)


def stalls_first(rank):
    dist.barrier()
    time.sleep(2.5 * TIMEOUT_S) if rank == 1 else survive(call)


def stalls(rank):
    call()
    dist.barrier()
    time.sleep(2.5 * TIMEOUT_S) if rank == 1 else survive(call)


def stalls_in_flight(rank):
    call()
    dist.barrier()
    if rank == 1:
        die_at_post(1, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    survive(lambda: call(**BIG))


def raises(rank):
    call()
    if rank == 1:
        raise ZeroDivisionError("a mistake of the user's")
    survive(call)


def in_flight(rank):
    """Posts a large transfer to the next rank; the ticket of the one from the last rank, and where it comes."""
    send, recv = torch.full((1 << 20,), float(rank)), torch.empty(1 << 20)
    _, arriving = transport_of(dist.group.WORLD).post(send, (rank + 1) % 3, recv, (rank - 1) % 3)
    return arriving, recv


def raises_in_flight(rank):
    """With a transfer that nobody takes part in."""
    call()
    if rank == 1:
        in_flight(rank)
        raise ZeroDivisionError("a mistake of the user's")
    survive(call)


def leaves_in_flight(rank):
    """What is in flight at the end of a process arrives, however late the others are."""
    call()
    if rank == 1:
        time.sleep(1.0)
    arriving, recv = in_flight(rank)
    if rank == 1:
        arriving.wait()
        assert bool((recv == 0.0).all())


def leaves(rank):
    for _ in range(3):
        call(grad=True).sum().backward()


def leaves_tidily(rank):
    leaves(rank)
    dist.destroy_process_group()


def begins_anew(rank):
    threads, store = [], dist.FileStore(os.environ["STORE"] + ".anew", dist.get_world_size())
    world_size = dist.get_world_size()
    dist.barrier()
    for number in range(5):
        dist.destroy_process_group()
        gc.collect()
        threads.append((len(ours()), system_threads()))
        dist.init_process_group("gloo", rank=rank, world_size=world_size, store=dist.PrefixStore(str(number), store))
        call(grad=True).sum().backward()
    print("threads", json.dumps(threads))


def system_threads():
    """How many this process has, once those that are about to end have ended."""
    least = len(os.listdir("/proc/self/task"))
    for _ in range(15):
        time.sleep(0.02)
        least = min(least, len(os.listdir("/proc/self/task")))
    return least


def subgroups(rank):
    for ranks in ([2, 0], [1, 2], [2, 1, 0], [1]):
        group = dist.new_group(ranks)
        if rank in ranks:
            call(group=group)
        else:
            with pytest.raises(ValueError, match="not a member"):
                call(group=group)
    mesh = dist.device_mesh.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    fo.linear_reduce_scatter(torch.ones(3, 4), torch.ones(5, 4), group=mesh)
    fo.linear_reduce_scatter(torch.ones(3, 4), torch.ones(5, 4), group=mesh["tp"])


def checked_backend(rank):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL, set below, wraps every backend."""
    call()
    fo.linear_reduce_scatter(torch.ones(3, 4), torch.ones(5, 4), group=dist.new_group([0, 1, 2], backend="cpu:gloo"))


def on_device_transport(rank):
    """The transport for accelerators, given CPU tensors and a registered gloo group, in every mode and pattern."""
    from flashoverlap.torch.device import Device

    group = dist.new_group([2, 0, 1])
    transport = Device(group, torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def shard(tensor, dim=0):
        return torch.tensor_split(tensor, 3, dim)[rank]

    def leaf(tensor):
        return tensor.detach().clone().requires_grad_()

    modes = [fo.Overlap(mode=mode) for mode in ("off", "slice", "collective")]
    modes += [fo.Overlap(mode="flash", pattern=pattern, splits=n) for pattern in ("direct", "ring") for n in (1, 3)]
    for rows in (12, 7, 2):
        for overlap in modes:
            x, up, down = random(rows, 6), random(8, 6), random(5, 8)
            grad = random(rows, 5)
            whole = [leaf(x), leaf(up), leaf(down)]
            y = whole[0] @ whole[1].T
            (torch.relu(y) @ whole[2].T).backward(grad)
            mine = [leaf(shard(x)), leaf(shard(up)), leaf(shard(down, 1))]
            h = fo.all_gather_linear(mine[0], mine[1], group=transport, overlap=overlap)
            z = fo.linear_reduce_scatter(torch.relu(h), mine[2], group=transport, overlap=overlap)
            z.backward(shard(grad))
            torch.testing.assert_close(h, shard(y, 1))
            for got, want, dim in zip(mine, whole, (0, 0, 1), strict=True):
                torch.testing.assert_close(got.grad, shard(want.grad, dim))
            full = fo.linear_all_reduce(torch.relu(h).detach(), mine[2].detach(), group=transport, overlap=overlap)
            torch.testing.assert_close(full, torch.relu(y) @ down.T)
            replicated = leaf(x)
            fo.all_reduce_grad_linear(replicated, mine[1], group=transport, overlap=overlap).sum().backward()
            torch.testing.assert_close(replicated.grad, up.sum(0).expand(rows, -1))
    print("right")


CASES = {name: case for name, case in globals().items() if callable(case) and getattr(case, "__code__", None)}

# --- the process that forks -------------------------------------------------------------------------------------------


def start(case, world_size, folder):
    """Forks the ranks of a case; returns {pid: rank} to the parent, and to a rank never."""
    pids = {}
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(folder / f"{case}.{rank}", os.O_CREAT | os.O_WRONLY), 1)
            os.dup2(1, 2)
            sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
            os.environ["STORE"] = str(folder / f"{case}.store")
            if case == "checked_backend":
                os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
                dist.set_debug_level_from_env()
            store = dist.FileStore(os.environ["STORE"], world_size)
            timeout = timedelta(seconds=TIMEOUT_S)
            dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store, timeout=timeout)
            CASES[case.partition(".")[0]](rank)  # "name.2" runs the same once more
            sys.exit()
        pids[pid] = rank
    return pids


def wait_for_all(started, folder):
    """Waits for all ranks of all cases; a stalled rank that is the last of its case is ended by force."""
    ended, end_s = {}, time.monotonic() + PROGRESS_S
    while len(ended) < sum(map(len, started.values())):
        for case, pids in started.items():
            for pid in pids.keys() - ended.keys():
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    ended[pid] = (os.waitstatus_to_exitcode(status), time.monotonic())
            left = pids.keys() - ended.keys()
            if time.monotonic() > end_s or (case.startswith("stalls") and len(left) == 1):
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return {
        case: [(*ended[pid], (folder / f"{case}.{rank}").read_text(errors="replace")) for pid, rank in pids.items()]
        for case, pids in started.items()
    }


if __name__ == "__main__":
    import pytest
    import torch
    import torch.distributed as dist

    import flashoverlap.torch as fo
    from flashoverlap.torch.transport import transport_of

    torch.set_num_threads(1)
    gc.freeze()  # forked ranks need not copy what their collector would only look at
    FOLDER = Path(tempfile.mkdtemp())
    CASES_LEFT, ENDED = sys.argv[1:], {}
    while CASES_LEFT:
        BATCH, CASES_LEFT = CASES_LEFT[:AT_ONCE], CASES_LEFT[AT_ONCE:]
        ENDED |= wait_for_all({case: start(case, 3, FOLDER) for case in BATCH}, FOLDER)
    print(json.dumps(ENDED))
    shutil.rmtree(FOLDER)
