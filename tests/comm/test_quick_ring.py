"""Ring and bulk operations in few calls of Python: the same words as `DeviceExchange`, and ranks of both kinds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.comm import quick_ring_ranks as functions
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_streams_are_given_the_same(rank_pool: Pools, world_size: int, narrow: bool) -> None:
    """Any rows, one piece or several, with and without the gathered rows."""
    for wrong in rank_pool(world_size).run(functions.same_words, 12, narrow, timeout_s=60):
        assert not wrong, "\n".join(wrong[:3])


@pytest.mark.parametrize("late", [-1, 0, 1])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_of_both_kinds(rank_pool: Pools, world_size: int, late: int) -> None:
    for quick, left in rank_pool(world_size).run(functions.mixed, 9, late, timeout_s=60):
        assert quick >= 8 and left >= 16, f"{quick} quick, {left} not"


def test_two_callers_streams(rank_pool: Pools) -> None:
    """A reader of the slot on another stream leaves the operation to `DeviceExchange`; so does the first use."""
    quick = [False, True, True, False, False, True, False, False, True]
    assert rank_pool(2).run(functions.two_callers, 9, timeout_s=60) == [[quick, quick]] * 2


def test_epochs_wrap(rank_pool: Pools) -> None:
    """But for the first and the refreshed uses (two a region each) all are quick."""
    assert rank_pool(2).run(functions.near_the_wrap, 7, 9, timeout_s=60) == [9 * 4 - 4] * 2


def test_what_is_out_of_the_ordinary(rank_pool: Pools) -> None:
    """On rank 0; its peers stay quick, but for the first use of each region."""
    most, *others = rank_pool(3).run(functions.left_to_the_exchange, timeout_s=60)
    for found in others:
        assert all(counts == ((10, 2) if what == "first uses" else (12, 0)) for what, counts in found.items()), found
    assert most.pop("metered") == (4, 0) and most.pop("a meter, one in three") == (8, 4)
    for what, counts in most.items():
        expected = (10, 2) if what == "first uses" else (12, 0) if what.startswith("nothing") else (0, 12)
        assert counts == expected, f"{what}: {counts}"


@pytest.mark.parametrize(
    ("kind", "after"), [("ring_ag", 0), ("ring_ag", 1), ("ring_rs", 0), ("ring_rs", 1), ("bulk_ag", 0), ("bulk_rs", 0)]
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gemm_raises(rank_pool: Pools, world_size: int, kind: str, after: int) -> None:
    """Before and after the peers were told which operation it is."""
    who = world_size - 1
    for rank, (check, close, quick) in enumerate(
        rank_pool(world_size).run(functions.raises, kind, after, who, timeout_s=60)
    ):
        assert quick == 2, "the second use of a slot, and the third"
        assert close.error == "ok" and check.seconds < 8.0, f"rank {rank}: {check}, {close}"
        if rank == who:
            assert check.error == "TpOverlapError" and "something in the model" in check.message, check
        else:
            assert check.error == "PeerTimeoutError" and check.peer == who, f"rank {rank}: {check}"


def test_batches_that_the_driver_does_not_take_at_once(rank_pool: Pools) -> None:
    """Such operations are `DeviceExchange`'s from the start."""
    assert rank_pool(3).run(functions.batches_too_long, timeout_s=60) == [(0, 0)] * 3


@pytest.mark.parametrize("world_size", [2, 3])
def test_peers_are_told_what_failed(rank_pool: Pools, world_size: int) -> None:
    """Also where the descriptor travels behind the GEMM. Then the host hears when the device is through."""
    expected = [(2 * (world_size - 1), 1)] * 3
    assert rank_pool(world_size).run(functions.told_of_what_fails, timeout_s=60) == [expected] * world_size


@pytest.mark.parametrize("kind", ["ring_ag", "ring_rs"])
def test_abort_inside_an_operation(rank_pool: Pools, kind: str) -> None:
    """It does not wait for the operation, whose end frees what is left."""
    (close, peer_check, _), (abort, check, threads) = rank_pool(2).run(functions.aborts, kind, timeout_s=60)
    assert abort.error == "ok" and abort.seconds < 1.0, f"waited for what cannot go on: {abort}"
    assert check.error == "NotInitializedError" and threads == 0, "the end of the operation ended the rest"
    assert peer_check.error == "PeerTimeoutError" and peer_check.peer == 1 and close.error == "ok", peer_check
