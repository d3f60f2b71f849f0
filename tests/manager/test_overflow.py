"""T above the capacity: an error by default, else that microbatch without overlap, counted and logged."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.manager import overflow_ranks
from tests.manager.ranks import CAPACITY
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]


@pytest.mark.parametrize("backend", ["shared", "process_group"])
def test_sequential(rank_pool: Pools, backend: str) -> None:
    for result in rank_pool(2).run(overflow_ranks.above_capacity, backend, timeout_s=60.0):
        gather = result["stats"]["qkv_fprop"]
        assert gather["overflow"] == 4, "T = 29, all rows on one rank, T = 25 and T = 26"
        assert gather["method_sequential"] == 4 and gather["method_ring_exchange"] == 2
        assert gather["tokens_above_capacity"] == 3, "all rows on one rank are 24 tokens"
        assert result["stats"]["qkv_dgrad"]["method_sequential"] == 2, "backward follows its forward"
        assert result["stats"]["qkv_dgrad"]["method_bulk"] == 2
        assert result["stats"]["fc1_fprop"]["overflow"] == 1
        assert len(result["lines"]) == 5, f"one line a microbatch: {result['lines']}"
        assert f"T={CAPACITY + 5}" in result["lines"][0] and "24 tokens" in result["lines"][0]
        assert "sequential" in result["explain"] and "overflow" in result["explain"]
        assert result["buffer"][0][0] == "CapacityError", "there is no room for a view"


def test_linear(rank_pool: Pools) -> None:
    rank_pool(3).run(overflow_ranks.linear, timeout_s=60.0)


def test_default_is_an_error(rank_pool: Pools) -> None:
    for outcomes in rank_pool(2).run(overflow_ranks.default_is_an_error, timeout_s=60.0):
        for outcome in outcomes:
            assert outcome is not None and outcome[0][0] == "CapacityError", outcome
            assert "T=25" in outcome[1] and "24 tokens" in outcome[1] and "on_overflow='sequential'" in outcome[1]


def test_ranks_that_disagree(rank_pool: Pools) -> None:
    for outcome in rank_pool(2).run(overflow_ranks.disagree, timeout_s=60.0):
        assert outcome is not None and outcome[0][0] == "RankMismatchError", outcome
        assert "T=25" in outcome[1] and "T=24" in outcome[1]
