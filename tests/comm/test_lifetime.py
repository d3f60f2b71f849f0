"""Warnings about slow ranks, and what is left of a manager that was closed, dropped or made again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.comm import rank_functions as functions
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]
pytestmark = pytest.mark.parametrize("backend", ["shared", "process_group"])


@pytest.mark.parametrize(("world_size", "kind"), [(2, "pipeline_rs"), (3, "ring_ag"), (3, "sequential_ag")])
def test_a_slow_rank_is_named(rank_pool: Pools, backend: str, world_size: int, kind: str) -> None:
    slow = world_size - 1
    for rank, texts in enumerate(rank_pool(world_size).run(functions.slow_rank, backend, kind)):
        if rank == slow:
            assert texts == []
            continue
        (text,) = texts  # once, not at every tick
        assert f"rank {rank} has been in operation number 2" in text and "T=30" in text and "timeout_s=20" in text
        assert f"; rank {slow} has not started it" in text, "the slow rank, and no other"


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_manager_that_nobody_closed_leaves_no_thread(rank_pool: Pools, backend: str, world_size: int) -> None:
    for threads in rank_pool(world_size).run(functions.forgotten_manager, backend):
        assert {"tpoverlap-watchdog", "tpoverlap-comm", "tpoverlap-compute0"} <= set(threads["during"])
        assert threads["after"] == threads["before"]


def test_after_close(rank_pool: Pools, backend: str) -> None:
    for outcomes in rank_pool(2).run(functions.closed_manager, backend):
        assert [outcome.error for outcome in outcomes] == ["NotInitializedError"] * len(outcomes)


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_manager_after_the_other(rank_pool: Pools, backend: str, world_size: int) -> None:
    assert rank_pool(world_size).run(functions.managers_in_turn, backend, 6) == [0] * world_size, "threads left"
