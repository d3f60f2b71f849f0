"""Ranks that disagree: RankMismatchError on every rank, with each rank's value, at once, and never a wrong number."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.comm import rank_functions as functions
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]
AG, SEQUENTIAL = "qkv_fprop all-gather ring_exchange", "plain_ag_fprop all-gather sequential"
UNKNOWN = "an operation unknown here"

# What the last rank does differently -> (what its peers' entries say, what its own says).
SAID = {
    "tokens": (f"{AG} with T={{}}", f"{AG} with T={{}}"),
    "counts": (f"{AG} with T={{}} and row counts", f"{AG} with T={{}} and row counts"),
    "name": (AG, "fc1_fprop all-gather ring_exchange/aggregate"),
    "order": (AG, "fc2_fprop reduce-scatter ring_exchange"),
    "bulk": (AG, "qkv_dgrad all-gather bulk"),
    "method": ("fc2_fprop reduce-scatter ring_exchange", "fc2_fprop reduce-scatter pipeline/3"),
    "num_splits": ("proj_fprop reduce-scatter pipeline/3", "proj_fprop reduce-scatter pipeline/2"),
    "close": (AG, "closes its manager"),
    "sequential_tokens": (f"{SEQUENTIAL} with T={{}}", f"{SEQUENTIAL} with T={{}}"),
    "sequential_counts": (f"{SEQUENTIAL} with T={{}} and row counts", f"{SEQUENTIAL} with T={{}} and row counts"),
    "sequential_order": (SEQUENTIAL, "plain_rs_fprop reduce-scatter sequential"),
    "sequential_method": (SEQUENTIAL, AG),
}
BEHIND_THE_CHECKS = ("method", "num_splits")
"""Options are compared when the manager is made, so a label with other options is one that the peers cannot know."""


@pytest.mark.parametrize("what", SAID)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("backend", ["shared", "process_group"])
def test_every_rank_is_told_every_ranks_value(rank_pool: Pools, backend: str, world_size: int, what: str) -> None:
    others, odd = SAID[what]
    num_tokens = 10 * world_size
    others, odd = others.format(num_tokens), odd.format(num_tokens + ("tokens" in what))
    results = rank_pool(world_size).run(functions.disagree, backend, what)
    for rank, (first, again, close) in enumerate(results):
        assert first.error == "RankMismatchError", f"rank {rank}: {first}"
        assert first.seconds < 5.0, "long before timeout_s=20"
        entries = _entries(first.message)
        assert len(entries) == world_size, first.message
        for number, entry in enumerate(entries):
            wanted = odd if number == world_size - 1 else others
            alike = (rank == world_size - 1) == (number == world_size - 1)
            named = entry.startswith(wanted)
            assert named or (what in BEHIND_THE_CHECKS and not alike and entry.startswith(UNKNOWN)), first.message
        if "counts" in what:
            assert len(set(entries)) == 2 and entries[0] != entries[-1], "the digests tell who differs"
        assert "operation number 3" in first.message
        assert ("has usually raised an error before" in first.message) == (what == "close")
        assert again.error == "RankMismatchError" and again.message == first.message, "later calls say the same"
        assert close.error == "ok" and close.seconds < 3.0


def _entries(message: str) -> list[str]:
    """What the message says of each rank."""
    parts = message.split(": ", 1)[1].split(". ", 1)[0].split("; ")
    assert [part.split(": ")[0] for part in parts] == [f"rank {rank}" for rank in range(len(parts))], message
    return [part.split(": ", 1)[1] for part in parts]


@pytest.mark.parametrize("backend", ["shared", "process_group"])
def test_a_rank_that_comes_after_the_others_have_left(rank_pool: Pools, backend: str) -> None:
    """They told it why: no time-out, no connection error."""
    results = rank_pool(3).run(functions.late_to_a_mismatch, backend)
    assert [result.error for result in results] == ["RankMismatchError"] * 3, results
    assert f"rank 0: {AG} with T=30; rank 1: {AG} with T=31" in results[2].message
    assert results[2].seconds < 3.0
