"""Buffers that calls take and give back: which are kept, and which are let go of."""

import torch

from flashoverlap.torch.staging import Lease, Staging

CPU = torch.device("cpu")


def test_a_buffer_is_taken_again_by_who_needs_no_less_than_a_quarter_of_it():
    staging = Staging()
    first = staging.take(1 << 20, CPU)
    staging.give([first])
    assert staging.bytes == 1 << 20
    assert staging.take(1 << 17, CPU) is not first
    assert staging.take(1 << 18, CPU) is first
    assert staging.bytes == 0


def test_what_lies_unused_goes_before_more_than_the_most_bytes_are_held():
    staging = Staging()
    staging.most_bytes = 5 << 20
    old, new, mine = (staging.take(count << 20, CPU) for count in (1, 2, 2))
    staging.give([old])
    staging.give([new])
    assert staging.bytes == 3 << 20  # of which nothing need go while 5 MiB are held
    assert staging.take(9 << 16, CPU) is old
    staging.give([old])
    staging.take(3 << 20, CPU)  # for which both are too small, and there is no room beside either
    assert staging.bytes == 0
    staging.most_bytes = 6 << 20
    staging.give([mine])
    staging.take(1 << 16, CPU)
    assert staging.bytes == 2 << 20  # too large to serve, and in nobody's way
    staging.most_bytes = None
    lease = Lease(staging, CPU)
    lease.tensor(3, 1 << 20, torch.float64)
    assert staging.bytes == 2 << 20
    lease.close()
    assert staging.bytes == 26 << 20
