"""Ranks as threads: one real gloo process group a thread, over a store in memory."""

import threading
from datetime import timedelta

import torch
import torch.distributed as dist


def run_ranks(world_size, function, *, timeout_s=30.0):
    """Runs ``function(rank, group)`` once per rank and returns the results by rank; raises the first rank's error."""
    results, errors = outcomes(world_size, function, timeout_s=timeout_s)
    for error in errors:
        if error is not None:
            raise error
    return results


def outcomes(world_size, function, *, timeout_s=30.0):
    """The same, giving back (results, errors) by rank."""
    store = dist.HashStore()
    results, errors = [None] * world_size, [None] * world_size

    def main(rank):
        try:
            torch.manual_seed(1234 + rank)
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=timeout_s)
            options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
            group = dist.ProcessGroupGloo(store, rank, world_size, options)
            results[rank] = function(rank, group)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=main, args=(rank,), name=f"rank {rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 60)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results, errors


def named(value):
    """The id of a parameter, the same in every process: functions have addresses in their text."""
    return value.__qualname__ if callable(value) else str(value)
