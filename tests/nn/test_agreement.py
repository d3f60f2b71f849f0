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


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("what", ["tokens", "targets", "cu_seqlens", "cu_seqlens, FP8", "cu_seqlens, whole rows"])
def test_inputs_that_differ_between_ranks_are_an_error(rank_pool: Pools, what: str, size: int) -> None:
    for error, message in rank_pool(size).run(agreement_ranks.inputs_differ, what, 3, timeout_s=60):
        assert error == "RankMismatchError" and what.partition(",")[0] in message


@pytest.mark.parametrize("what", ["tokens", "targets"])
def test_a_value_that_one_rank_refuses_is_an_error_of_all(rank_pool: Pools, what: str) -> None:
    for rank, (error, message) in enumerate(
        rank_pool(3).run(agreement_ranks.inputs_differ, what, 99, timeout_s=30)  # far below nobody's time-out of 10 s
    ):
        assert error == ("ActiveShapeError" if rank == 1 else "RankMismatchError"), message
        assert "rank 1: " in message and "refused, a value is outside the vocabulary" in message
        assert rank != 1 or "99" in message


@pytest.mark.parametrize("what", ["tokens", "targets"])
def test_a_value_that_all_ranks_refuse_costs_nothing(rank_pool: Pools, what: str) -> None:
    for rank, (error, message) in enumerate(rank_pool(2).run(agreement_ranks.inputs_differ, what, -1, timeout_s=30)):
        assert error == "ActiveShapeError" and f"rank {rank}" in message and "99" in message


def test_values_outside_the_vocabulary_that_nobody_looks_at_are_nan(rank_pool: Pools) -> None:
    rank_pool(2).run(agreement_ranks.unseen_values, timeout_s=60)


@pytest.mark.parametrize("what", ["tokens", "targets"])
def test_equal_inputs_are_none(rank_pool: Pools, what: str) -> None:
    assert rank_pool(2).run(agreement_ranks.inputs_differ, what, 7, timeout_s=60) == [("ok", "")] * 2


@pytest.mark.parametrize("what", ["buffer", "empty rank", "staging"])
def test_backward_has_the_rows_of_its_forward(rank_pool: Pools, what: str) -> None:
    assert max(rank_pool(2).run(agreement_ranks.views_are_overwritten, what, timeout_s=60)) < 1e-4


def test_an_odd_tuning_cache_is_not_used(rank_pool: Pools) -> None:
    assert rank_pool(2).run(agreement_ranks.odd_tuning_cache, timeout_s=60) == ["ok"] * 2
