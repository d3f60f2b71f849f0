"""What all ranks must agree on beyond T, and what autograd may keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.nn import agreement_ranks
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]


@pytest.mark.parametrize("what", ["epsilon", "margin", "powers", "class"])
def test_fp8_recipes_that_differ_are_an_error(rank_pool: Pools, what: str) -> None:
    assert rank_pool(2).run(agreement_ranks.recipes_differ, what, timeout_s=60) == ["RankMismatchError"] * 2


@pytest.mark.parametrize("how", ["load", "assign", "in place"])
def test_delayed_histories_that_differ_are_an_error(rank_pool: Pools, how: str) -> None:
    for outcomes in rank_pool(2).run(agreement_ranks.histories_differ, how, timeout_s=60):
        assert outcomes[:2] == ["ok", "ok"] and len(outcomes) == 3
        assert outcomes[2].startswith("RankMismatchError") and "qkv_fprop all-gather" in outcomes[2]
        assert "delayed scaling's history" in outcomes[2]


def test_a_history_that_all_ranks_load_is_none(rank_pool: Pools) -> None:
    assert rank_pool(2).run(agreement_ranks.histories_differ, "all load", timeout_s=60) == [["ok"] * 4] * 2


@pytest.mark.parametrize("what", ["embedding", "cross entropy"])
def test_vocabularies_that_differ_are_an_error(rank_pool: Pools, what: str) -> None:
    assert rank_pool(2).run(agreement_ranks.vocabularies_differ, what, timeout_s=60) == ["RankMismatchError"] * 2


@pytest.mark.parametrize("what", ["buffer", "empty rank", "staging"])
def test_backward_has_the_rows_of_its_forward(rank_pool: Pools, what: str) -> None:
    assert max(rank_pool(2).run(agreement_ranks.views_are_overwritten, what, timeout_s=60)) < 1e-4


def test_an_odd_tuning_cache_is_not_used(rank_pool: Pools) -> None:
    assert rank_pool(2).run(agreement_ranks.odd_tuning_cache, timeout_s=60) == ["ok"] * 2
