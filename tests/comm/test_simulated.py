"""The code for GPUs on a simulated device: errors come late there, but they come, on every rank, and nothing hangs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.comm import simulated_ranks as functions
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]


@pytest.mark.parametrize("what", ["tokens", "counts", "order", "sequential_tokens"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_disagree(rank_pool: Pools, world_size: int, what: str) -> None:
    for rank, (check, again, close) in enumerate(rank_pool(world_size).run(functions.disagree, what, timeout_s=60)):
        assert check.error == "RankMismatchError", f"rank {rank}: {check}"
        assert "operation number 3" in check.message and check.message.count("rank ") >= world_size
        assert again.error == "RankMismatchError" and again.message == check.message
        assert close.error == "ok" and close.seconds < 3.0


@pytest.mark.parametrize(("kind", "where"), [("ring_ag", "gemm"), ("ring_rs", "transfer"), ("pipeline_rs", "gemm")])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_raises(rank_pool: Pools, world_size: int, kind: str, where: str) -> None:
    who = world_size - 1
    failures = rank_pool(world_size).run(functions.fail_inside, kind, where, who, 20.0, timeout_s=60)
    for rank, (check, close) in enumerate(failures):
        assert close.error == "ok" and close.seconds < 3.0, f"rank {rank}: {close}"
        assert check.seconds < 8.0, f"rank {rank} noticed after {check.seconds:.1f} s"
        if rank == who:
            assert check.error == "TpOverlapError" and "something in the model" in check.message
        else:
            assert check.error == "PeerTimeoutError" and check.peer == who, f"rank {rank}: {check}"


@pytest.mark.parametrize("kind", ["ring_ag", "bulk_rs"])
def test_a_rank_dies(rank_pool: Pools, kind: str) -> None:
    failures = rank_pool(3).run(functions.fail_inside, kind, "kill", 2, 20.0, expect_dead={2}, timeout_s=60)
    for check, close in failures[:2]:
        assert check.error == "PeerTimeoutError" and check.peer == 2 and "died" in check.message, check
        assert check.seconds < 8.0 and close.error == "ok"


@pytest.mark.parametrize("kind", ["ring_ag", pytest.param("ring_rs", marks=pytest.mark.slow)])  # waits for its time-out
def test_a_rank_stalls(rank_pool: Pools, kind: str) -> None:
    """Its stream stands still for longer than timeout_s=2: both watchdogs end what waits by then."""
    for check, close in rank_pool(2).run(functions.fail_inside, kind, "stall", 1, 2.0, timeout_s=60):
        assert check.error == "PeerTimeoutError" and "timeout_s=2" in check.message, check
        assert 1.5 < check.seconds < 6.0 and close.error == "ok"


@pytest.mark.parametrize("where", ["gemm", "thread"])
@pytest.mark.parametrize("backend", ["simulated", "shared", "process_group"])
def test_abort_inside_an_operation(rank_pool: Pools, backend: str, where: str) -> None:
    """It neither waits for the operation, which may be its own thread's, nor takes its memory away."""
    (close, _, peer_check, _), (abort, ran, check, threads) = rank_pool(2).run(
        functions.abort_inside, where, backend, timeout_s=60
    )
    assert abort.error == "ok" and abort.seconds < 1.0, f"waited for what cannot go on: {abort}"
    assert ran.error == ("ok" if backend == "simulated" else "NotInitializedError"), ran  # there it is garbage
    assert check.error == "NotInitializedError" and threads == 0, "the end of the operation ended the rest"
    assert peer_check.error == "PeerTimeoutError" and "rank 1 closed its manager" in peer_check.message
    assert close.error == "ok"


def test_what_was_poisoned_is_no_number(rank_pool: Pools) -> None:
    assert rank_pool(2).run(functions.poisoned, timeout_s=60)[0] == [True, False], "NaN where the peer's rows belong"


@pytest.mark.parametrize("by_comm", [True, False])
@pytest.mark.parametrize("uses", [1, 4])
def test_flags_are_refreshed_after_rows_that_the_callers_stream_sends(
    rank_pool: Pools, uses: int, by_comm: bool
) -> None:
    """As a kernel of `fused` does. The first uses of a region refresh all flags, those of such rows too."""
    assert rank_pool(2).run(functions.rows_from_the_callers_stream, uses, by_comm, timeout_s=60) == [[True] * uses] * 2
