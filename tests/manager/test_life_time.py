"""From initialisation to close: use after the end, exceptions on the way, and starting again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.manager import life_time_ranks
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]


@pytest.mark.parametrize("how", ["close", "abort", "exception"])
def test_use_after_the_end(rank_pool: Pools, how: str) -> None:
    for rank, outcomes in enumerate(rank_pool(2).run(life_time_ranks.after_the_end, how, timeout_s=60.0)):
        for name, outcome in outcomes.items():
            assert outcome is not None, f"rank {rank}, {name}: nothing was raised"
            classes, message = outcome
            assert classes[0] == "NotInitializedError", f"rank {rank}, {name}: {classes[0]}: {message}"
            assert "closed" in message and "create a new one" in message, message


def test_an_exception_inside_with_comes_out(rank_pool: Pools) -> None:
    (first,), (second,) = rank_pool(2).run(life_time_ranks.an_exception_is_kept, timeout_s=60.0)
    assert first is not None and first[0][0] == "KeyError"
    assert second is not None and second[0][0] == "PeerTimeoutError", second
    assert "rank 0" in second[1]


FIRST_ERRORS = {
    "caught": ("ActiveShapeError: qkv_fprop", "17 features"),
    "finally": ("ActiveShapeError: qkv_fprop", "17 features"),
    "user": ("KeyError", "the user's own"),
    "shape": ("CapacityError: active shape", "T=25"),
    "scatter": ("ActiveShapeError: proj_fprop", "takes 5"),
    "bulk gather": ("ActiveShapeError: qkv_dgrad", "a @ b.T"),
    "bulk scatter": ("ActiveShapeError: qkv_wgrad", "5 features"),
    "normed layer": ("ActiveShapeError: qkv", "17 features"),
    "cu_seqlens": ("ActiveShapeError: cu_seqlens ends at 99",),
    "again": (),
}


@pytest.mark.parametrize("how", FIRST_ERRORS)
def test_close_names_the_first_error_of_its_rank(rank_pool: Pools, how: str) -> None:
    outcome = rank_pool(2).run(life_time_ranks.closes_after_an_error, how, timeout_s=60.0)[0][0]
    assert outcome is not None and outcome[0][0] == "RankMismatchError", outcome
    assert "rank 0: closes its manager" in outcome[1]
    assert ("first error of rank 0" in outcome[1]) == bool(FIRST_ERRORS[how]), outcome[1]
    assert all(fragment in outcome[1] for fragment in FIRST_ERRORS[how]), outcome[1]


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("method", ["ring_exchange", "pipeline", "sequential"])
def test_an_error_that_is_kept_keeps_no_arena(rank_pool: Pools, method: str, how: str) -> None:
    for found in rank_pool(3).run(life_time_ranks.what_an_error_keeps, how, method, timeout_s=60.0):
        assert found["error"] == "RankMismatchError"
        assert found["open"] == 3 and found["kept"] == 0, "the arena of each rank was mapped, none is after the end"
        assert not found["frame"], "the caller's frame lives as long as the caller keeps the error, and no longer"


def test_again_and_again(rank_pool: Pools) -> None:
    rank_pool(3).run(life_time_ranks.again_and_again, timeout_s=60.0)


def test_one_rank_alone(rank_pool: Pools) -> None:
    for result in rank_pool(2).run(life_time_ranks.alone, timeout_s=60.0):
        assert result["view"] is not None and result["view"][0][0] == "ConfigError"
        assert "R = 1" in result["view"][1]
        assert "sequential" in result["explain"] and "R = 1" in result["explain"]
        assert result["report"]["symmetric_bytes"] == 0 and result["report"]["allocations"] == 0
        assert result["stats"]["qkv_fprop"]["method_sequential"] == 1
        assert result["partition"] is None
