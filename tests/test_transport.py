import gc
import os
import threading
import time
import weakref
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

import flashoverlap.torch as fo
from flashoverlap.torch.errors import reason
from flashoverlap.torch.gloo import Gloo
from flashoverlap.torch.transport import CARD_BYTES, agree, refusing, transport_of
from ranks import outcomes, run_ranks


def call(group, rows=6, *, features=4, out=5, **options):
    x, weight = torch.ones(rows, features), torch.ones(out, features)
    return fo.linear_reduce_scatter(x, weight, group=group, **options)


def is_right(z, world_size, features=4):
    return bool((z == features * world_size).all())


def finish(*tickets):
    for ticket in tickets:
        ticket.wait()


# --- moving pieces ----------------------------------------------------------------------------------------------------


def test_sends_to_several_peers_leave_one_after_another():
    """Rank 1 receives late; what rank 0 posted for rank 2 after that must not overtake it, and the order is kept."""
    late = threading.Event()

    def rank_main(rank, group):
        transport = transport_of(group)
        empty = torch.empty(0)
        if rank == 0:
            sends = [torch.full((1000,), float(n)) for n in range(6)]
            tickets = [transport.post(send, 1 + n % 2, empty, 1)[0] for n, send in enumerate(sends)]
            time.sleep(0.3)
            left_early = [ticket.done_s for ticket in tickets if ticket.done_s]
            late.set()
            finish(*tickets)
            return left_early, [ticket.done_s for ticket in tickets]
        received = [torch.full((1000,), -1.0) for _ in range(3)]
        if rank == 1:
            late.wait()
        finish(*[transport.post(empty, 0, each, 0)[1] for each in received])
        return [each.unique().tolist() for each in received]

    (early, done), one, two = run_ranks(3, rank_main)
    assert early == []
    assert done == sorted(done)
    assert one == [[0.0], [2.0], [4.0]]
    assert two == [[1.0], [3.0], [5.0]]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_ring_hands_on_what_has_arrived(world_size):
    """Every piece goes round the whole ring, each hop posted at once, before anything has come."""

    def rank_main(rank, group):
        transport = transport_of(group)
        pieces = [torch.full((20_000,), float(rank))] + [torch.full((20_000,), -1.0) for _ in range(world_size)]
        after, tickets = None, []
        for hop in range(world_size):
            sent, after = transport.post(
                pieces[hop], (rank + 1) % world_size, pieces[hop + 1], (rank - 1) % world_size, after
            )
            tickets += [sent, after]
        finish(*tickets)
        return [piece.unique().tolist() for piece in pieces]

    for rank, pieces in enumerate(run_ranks(world_size, rank_main)):
        assert pieces == [[float((rank - hop) % world_size)] for hop in range(world_size + 1)]


def test_thousands_of_messages_may_be_in_flight():
    count = 4000

    def rank_main(rank, group):
        transport = transport_of(group)
        sends = torch.arange(float(count)) + 10_000 * rank
        received = torch.full((count,), -1.0)
        to, frm = (rank + 1) % 3, (rank - 1) % 3
        tickets = [transport.post(sends[n : n + 1], to, received[n : n + 1], frm) for n in range(count)]
        for pair in tickets:
            finish(*pair)
        return torch.equal(received, torch.arange(float(count)) + 10_000 * frm)

    assert run_ranks(3, rank_main) == [True] * 3


def test_empty_halves_move_nothing():
    def rank_main(rank, group):
        transport = transport_of(group)
        send, recv = torch.full((3 * rank,), 7.0), torch.empty(3 * (1 - rank))
        finish(*transport.post(send, 1 - rank, recv, 1 - rank))
        return recv.tolist()

    assert run_ranks(2, rank_main) == [[7.0] * 3, []]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("sizes", [[4, 4, 4], [5, 3, 0], [0, 1, 7]])
def test_collectives_take_pieces_of_any_size(world_size, sizes):
    sizes = sizes[:world_size]

    def rank_main(rank, group):
        transport = transport_of(group)
        mine = [torch.full((n,), 10.0 * rank + other) for other, n in enumerate(sizes)]
        gathered = [torch.full((n,), -1.0) for n in sizes]
        transport.collective("all_gather", [mine[rank]], gathered).wait()
        assert torch.equal(mine[rank], torch.full((sizes[rank],), 11.0 * rank))
        scattered = torch.full((sizes[rank],), -1.0)
        transport.collective("reduce_scatter", mine, [scattered]).wait()
        reduced = [torch.full((n,), -1.0) for n in sizes]
        transport.collective("all_reduce", mine, reduced).wait()
        swapped = [torch.full((sizes[rank],), -1.0) for _ in sizes]
        transport.collective("all_to_all", mine, swapped).wait()
        return gathered, scattered, reduced, swapped

    tens = 10.0 * sum(range(world_size))
    for rank, (gathered, scattered, reduced, swapped) in enumerate(run_ranks(world_size, rank_main)):
        for other, n in enumerate(sizes):
            if other != rank:  # the own rows are read where they lie
                assert torch.equal(gathered[other], torch.full((n,), 11.0 * other))
            assert torch.equal(reduced[other], torch.full((n,), tens + world_size * other))
            assert torch.equal(swapped[other], torch.full((sizes[rank],), 10.0 * other + rank))
        assert torch.equal(scattered, torch.full((sizes[rank],), tens + world_size * rank))


# --- beside the user --------------------------------------------------------------------------------------------------


def test_pending_messages_of_the_user_are_left_alone():
    """Receives with many tags are pending before, and sends after, our channels are built and used, and the reverse."""
    tags = [0, 1, 2, 3, 4, 15, 16, 17, 18, 1 << 20, (1 << 31) - 1]

    def rank_main(rank, group):
        other = 1 - rank
        received = {tag: torch.full((3,), -1.0) for tag in tags}
        sent = {tag: torch.full((3,), tag % 1000 + 0.5 * rank) for tag in tags}
        early, late = tags[::2], tags[1::2]
        works = [group.recv([received[tag]], other, tag) for tag in early]
        works += [group.send([sent[tag]], other, tag) for tag in late]
        assert is_right(call(group), 2)
        works += [group.recv([received[tag]], other, tag) for tag in late]
        assert is_right(call(group), 2)
        works += [group.send([sent[tag]], other, tag) for tag in early]
        for work in works:
            work.wait()
        assert is_right(call(group), 2)
        return all(torch.equal(received[tag], torch.full((3,), tag % 1000 + 0.5 * other)) for tag in tags)

    assert run_ranks(2, rank_main) == [True, True]


def test_ranks_may_come_to_the_first_call_at_very_different_times():
    def rank_main(rank, group):
        time.sleep((0.0, 0.7, 0.3, 1.1)[rank])
        return is_right(call(group, rows=8), 4)

    assert run_ranks(4, rank_main) == [True] * 4


def test_groups_used_in_opposite_order_end_in_an_error_and_do_not_hang():
    """As with two collectives of torch's: each rank waits for the other in another group."""
    store = dist.HashStore()

    def rank_main(rank, group):
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._devices = group.options._timeout, group.options._devices
        second = dist.ProcessGroupGloo(dist.PrefixStore("second", store), rank, 2, options)
        for each in [group, second][:: 1 if rank else -1]:
            call(each)

    _, errors = outcomes(2, rank_main, timeout_s=1.5)
    for rank, error in enumerate(errors):
        assert isinstance(error, fo.PeerError)
        assert f"linear_reduce_scatter: rank {1 - rank} of the group is gone or did not call in time" in str(error)


def test_a_transport_ends_with_its_group():
    def rank_main(rank, group):
        call(group)
        gathered = fo.all_gather_linear(torch.ones(2, 3), torch.ones(4, 3), group=group)
        del gathered
        transport = transport_of(group)
        threads = [waiter.thread for waiter in transport._threads.values()]
        return (weakref.ref(transport), weakref.ref(group)), threads

    refs, threads = zip(*run_ranks(3, rank_main), strict=True)
    gc.collect()
    for thread in [thread for each in threads for thread in each]:
        thread.join(10)
        assert not thread.is_alive()
    assert all(ref() is None for pair in refs for ref in pair)


def test_groups_made_anew_leave_no_threads():
    run_ranks(2, lambda rank, group: call(group))
    gc.collect()
    before = len(os.listdir("/proc/self/task"))  # others' threads may end meanwhile, so fewer is well
    for _ in range(3):
        run_ranks(2, lambda rank, group: call(group))
        gc.collect()
    assert len(os.listdir("/proc/self/task")) <= before


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_thousand_refusals_leave_nothing_behind():
    def rank_main(rank, group):
        transport = transport_of(group)
        for _ in range(1000):
            with pytest.raises(ValueError, match="no good"), refusing(transport):
                raise ValueError("no good")
        right = is_right(call(group), 3)
        return right, len(transport._unclaimed), transport.failed

    assert run_ranks(3, rank_main) == [(True, 0, False)] * 3


def test_refusing_alone_neither_waits_nor_is_forgotten():
    """Rank 0 refuses three calls long before rank 1 makes them; rank 1 hears of each, and the fourth call works."""
    refused = threading.Event()

    def rank_main(rank, group):
        call(group)
        for number in range(3):
            if rank == 0:
                with pytest.raises(ValueError, match="input features"):
                    fo.linear_reduce_scatter(torch.ones(6, 4), torch.ones(5, 7 + number), group=group)
            else:
                refused.wait()
                with pytest.raises(fo.PeerError, match=rf"refused by rank 0: .*\(5, {7 + number}\)"):
                    call(group)
        refused.set()
        return is_right(call(group), 2)

    assert run_ranks(2, rank_main) == [True, True]


def test_probes_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("flashoverlap.torch.gloo._PROBE_S", 0.001)

    def rank_main(rank, group):
        transport = transport_of(group)
        send, recv = torch.ones(4), torch.zeros(4)
        if rank:
            time.sleep(0.5)
        finish(*transport.post(send, 1 - rank, recv, 1 - rank))
        return len(transport._probes), recv.tolist()

    (probes, first), (_, second) = run_ranks(2, rank_main)
    assert 0 < probes <= 16
    assert first == second == [1.0] * 4


# --- giving up --------------------------------------------------------------------------------------------------------


def fails_on_rank_1(rank, group, exchange_first):
    """An operator that breaks on rank 1, before or after it has begun to move pieces."""
    made = []

    def activation(x):
        made.append(x)
        if rank == 1 and len(made) > 1 + exchange_first:  # the first is the operator's trying out
            raise ZeroDivisionError("a kernel of the user's")
        return torch.relu(x)

    x, up, down = torch.ones(6, 4), torch.ones(5, 4), torch.ones(4, 5)
    return fo.mlp(torch.tensor_split(x, 3)[rank], up, down, activation=activation, group=group)


@pytest.mark.parametrize("exchange_first", [0, 1])
def test_an_error_on_one_rank_is_told_to_all_and_the_group_works_again(exchange_first):
    barrier = threading.Barrier(3)

    def rank_main(rank, group):
        x, weight = torch.ones(6, 4, requires_grad=True), torch.ones(5, 4)
        earlier = fo.linear_reduce_scatter(x, weight, group=group)
        with pytest.raises(ZeroDivisionError if rank == 1 else fo.PeerError) as caught:
            fails_on_rank_1(rank, group, exchange_first)
        barrier.wait(30)
        with pytest.raises(fo.PeerError, match=r"^linear_reduce_scatter: "):
            earlier.sum().backward()  # its channels are gone
        assert is_right(call(group), 3)
        return str(caught.value)

    start = time.monotonic()
    first, second, third = run_ranks(3, rank_main, timeout_s=60)
    assert time.monotonic() - start < 50, "somebody has waited for the time-out"
    assert second == "a kernel of the user's"
    for message in (first, third):
        assert message.startswith("mlp: ")
        assert "rank 1 gave up: the call was broken off (a kernel of the user's)" in message


def test_last_words_pass_the_blame_on():
    """Rank 2 only waits for rank 1, and rank 1 only for rank 0, which breaks off."""

    def rank_main(rank, group):
        transport = transport_of(group)
        empty = torch.empty(0)
        if rank == 0:
            time.sleep(0.3)
            transport.fail(RuntimeError("out of memory"))
            return "out of memory"
        received = transport.post(empty, 0, torch.empty(10), rank - 1)[1]
        with pytest.raises(fo.PeerError) as caught:
            received.wait()
        transport.fail(caught.value)  # as execute does
        return str(caught.value)

    for message in run_ranks(3, rank_main, timeout_s=60):
        assert "out of memory" in message


def test_a_failed_transport_refuses_everything_with_the_first_reason():
    def rank_main(rank, group):
        transport = transport_of(group)
        agree(transport, "same", "same")
        transport.fail(RuntimeError(f"reason {rank}"))
        for attempt in (
            lambda: transport.exchange_cards(bytes(CARD_BYTES)),
            lambda: transport.post(torch.ones(2), 1 - rank, torch.ones(2), 1 - rank),
            lambda: transport.collective("all_reduce", [torch.ones(2)], [torch.ones(2)]).wait(),
        ):
            with pytest.raises(fo.PeerError, match=f"reason {rank}"):
                attempt()
        transport.refuse(bytes(CARD_BYTES))
        transport.fail(RuntimeError("again"))
        return transport.failed

    assert run_ranks(2, rank_main) == [True, True]


def test_giving_up_in_mid_transfer_again_and_again():
    """What is in flight when a rank gives up must neither crash nor hang it, whichever thread waits for it."""
    big = 1 << 20

    def rank_main(rank, group):
        for number in range(4):
            transport = transport_of(group)
            assert isinstance(transport, Gloo)
            send, recv = torch.ones(big), torch.empty(big)

            def begin(transport=transport, send=send, recv=recv):
                agree(transport, "same", "same")
                for _ in range(3):
                    transport.post(send, (rank + 1) % 3, recv, (rank - 1) % 3)

            if number % 3 == rank:
                begin()
                transport.fail(RuntimeError("enough"))
            else:
                with suppress(fo.PeerError):  # a slow rank may hear of it before it has begun
                    begin()
                with pytest.raises(fo.PeerError):
                    agree(transport, "same", "same")
                transport.fail(RuntimeError("so be it"))
            assert transport.failed
        return is_right(call(group), 3)

    assert run_ranks(3, rank_main, timeout_s=20) == [True] * 3


def test_the_reason_of_an_error_is_short():
    text = (
        "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9. This is typically caused by "
        "a remote worker crashing. Check the logs\nand more"
    )
    assert reason(RuntimeError(text)) == "Connection closed by peer [127.0.0.1]:9"
    assert reason(KeyboardInterrupt()) == "KeyboardInterrupt"
