"""Dispatch by T on ranks: every rank runs what the evidence says, and never anything else than what was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tuning import dispatch_ranks
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]
DEFAULTS = {"fc1_fprop": "ring_exchange", "fc2_fprop": "ring_exchange", "qkv_dgrad": "bulk", "fc1_wgrad": "bulk"}


@pytest.fixture(scope="module")
def by_section(rank_pool: Pools) -> list[dict[str, Any]]:
    return rank_pool(2).run(dispatch_ranks.by_section, timeout_s=60.0)


def test_section_decides_by_tokens(by_section: list[dict[str, Any]]) -> None:
    for result in by_section:
        for small in (result["small"], result["pinned small"]):
            assert small["qkv_fprop"] == "sequential" and small["proj_fprop"] == "pipeline"
            assert small["fc1_dgrad"] == "sequential"
            assert {name: small[name] for name in DEFAULTS} == DEFAULTS
        for large in (result["large"], result["pinned large"]):
            assert large["qkv_fprop"] == "ring_exchange" and large["proj_fprop"] == "sequential"
        other = result["another shape"]
        assert (other["qkv_fprop"], other["fc1_dgrad"]) == ("ring_exchange", "bulk"), "rows are for other features"


def test_what_is_written_stays(by_section: list[dict[str, Any]]) -> None:
    for result in by_section:
        written = result["written small"]
        assert written["qkv_fprop"] == "ring_exchange" and written["fc1_dgrad"] == "bulk"
        assert written["proj_fprop"] == "pipeline", "there the section says itself that it stands instead of it"
        assert result["written plan"]["qkv_fprop"]["method"] == "ring_exchange"
        assert result["written plan"]["proj_fprop"]["method"] == "auto"


def test_explain_has_the_figures(by_section: list[dict[str, Any]]) -> None:
    results = by_section
    assert results[0]["plan"] == results[1]["plan"]
    assert results[0]["plan"]["methods"]["qkv_fprop"]["method"] == "auto"
    for result in results:
        assert "pass features=" in result["before"] and "default" in result["before"]
        small, large = result["explain small"], result["explain large"]
        assert "at T=3: sequential" in small and "overlap does not pay: sequential 5.0 us" in small
        assert "the best overlap 7.5 us" in small and "by_tokens" in small
        assert "at T=20: ring_exchange" in large and "takes 6.0 us, sequential 9.0 us" in large
        assert "up to T 8: sequential, 24: ring_exchange" in large
        assert "at T=3: pipeline in 3" in result["explain proj"]
        assert "by_tokens has rows for features" in result["explain other"]
        assert "and none for features 7 at width 16" in result["explain other"]


def test_cache_of_rank_zero_serves_all(rank_pool: Pools, tmp_path: Path) -> None:
    results = rank_pool(2).run(dispatch_ranks.by_cache, str(tmp_path), timeout_s=60.0)
    for rank, result in enumerate(results):
        assert result["small"]["qkv_fprop"] == "sequential" and result["large"]["qkv_fprop"] == "ring_exchange"
        assert "tuned cache" in result["explain"] and "measured by tpoverlap tune" in result["explain"]
        for unused in ("off", "written", "broken"):
            assert result[unused]["qkv_fprop"] == "ring_exchange", unused
        assert len(result["broken lines"]) == (1 if rank == 0 else 0)
    assert not (tmp_path / "rank1").exists(), "other ranks need no cache"


def test_cost_model_decides_where_a_plan_brings_a_device(rank_pool: Pools) -> None:
    for result in rank_pool(2).run(dispatch_ranks.by_model, timeout_s=60.0):
        assert result["slow copies"]["qkv_fprop"] == "ring_exchange" and result["slow copies"]["qkv_dgrad"] == "bulk"
        slow = result["slow launches"]
        assert slow["qkv_fprop"] == slow["qkv_dgrad"] == "sequential", "two GEMMs are two launches"
        assert slow["fc1_fprop"] == "ring_exchange", "pinned to a method, whatever the model says"
        text = result["slow launches explain"]
        assert "cost model" in text and "overlap does not pay" in text and "median error" in text


def test_ranks_with_different_sections_are_told(rank_pool: Pools) -> None:
    for outcome in rank_pool(2).run(dispatch_ranks.different_evidence, timeout_s=60.0):
        assert outcome is not None and outcome[0][0] == "RankMismatchError" and "ub_cfgs" in outcome[1]
