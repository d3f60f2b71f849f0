"""FP8 in layers and by Transformer Engine's names: misuse, agreement of ranks, checkpoints, what autograd keeps."""

from __future__ import annotations

import pytest

from tests.manager.ranks import Outcome
from tests.nn import fp8_ranks
from tests.nn.fp8_ranks import CAPACITY, FEATURES, HIDDEN

MISUSES = {
    "no FP8 mode": ("ConfigError", ("qkv", "quantization_modes=['none', 'fp8']")),
    "get": ("ConfigError", ("qkv_fprop", "quantization_modes=['none', 'fp8']")),
    "a recipe instead of a state": ("ConfigError", ("Fp8State", "Float8CurrentScaling")),
    "K": ("ActiveShapeError", ("odd", "in_features 40", "multiple of 16", "48")),
    "N": ("ActiveShapeError", ("out_features 20", "pad", "32", "without fp8")),
    "row K": ("ActiveShapeError", ("in_features 24", "32")),
    "number of weights": ("ConfigError", ("2 weights", "made for 1", "num_weights=2")),
    "in the buffer": ("ActiveShapeError", ("communication buffer", "clone it")),
    "FP8 communicator": ("ConfigError", ("qkv_fprop", "fp8=Fp8State(recipe)")),
}


def require(outcome: Outcome, error: str, says: tuple[str, ...], where: str) -> None:
    assert outcome is not None, f"{where}: nothing was raised"
    assert outcome[0][0] == error, f"{where}: {outcome}"
    missing = [word for word in says if word not in outcome[1]]
    assert not missing, f"{where}: {missing} not in {outcome[1]!r}"


def test_misuses(rank_pool) -> None:
    for outcomes in rank_pool(2).run(fp8_ranks.misuses, timeout_s=60.0):
        assert set(outcomes) == set(MISUSES)
        for name, (error, says) in MISUSES.items():
            require(outcomes[name], error, says, name)


def test_configurations(rank_pool) -> None:
    for outcomes in rank_pool(2).run(fp8_ranks.configurations, timeout_s=60.0):
        require(outcomes["wide gather"], "ConfigError", ("qkv_fprop.fp8_buf", "remove fp8_buf"), "wide gather")
        require(
            outcomes["ranks differ"],
            "RankMismatchError",
            ("quantization_modes", "on rank 0", "on rank 1"),
            "ranks differ",
        )


def test_fused_without_kernels(rank_pool) -> None:
    for outcome in rank_pool(2).run(fp8_ranks.fused_without_kernels, timeout_s=60.0):
        require(outcome, "BackendUnavailableError", ("qkv_fprop", "'fused'", "another method"), "fused")


def test_one_rank_without_fp8(rank_pool) -> None:
    for outcome in rank_pool(2).run(fp8_ranks.one_rank_without_fp8, timeout_s=60.0):
        require(outcome, "RankMismatchError", ("qkv_fprop", "/fp8-scales"), "one rank without FP8")


@pytest.mark.parametrize("size", [2, 3])
def test_te_names(rank_pool, size: int) -> None:
    for result in rank_pool(size).run(fp8_ranks.te_names, timeout_s=60.0):
        assert result["dtypes"] == ["torch.float32", "torch.uint8"]
        assert result["shapes"] == [(7, HIDDEN)] * 2
        assert result["regions"] == ["ag", "rs", "scales"]
        assert 0 <= result["symmetric"] - result["estimate"] < 4096, "but for a page"
        # FP8 ran (errors are not 0) and is right; the second one started with stale scales of 1, but no value saturates
        assert all(0.001 < error < 0.12 for error in result["errors"]), result["errors"]
        assert "fp8.state.input.amax_history" in result["state"]


@pytest.mark.parametrize("size", [2, 3])
def test_resume_and_recompute(rank_pool, size: int) -> None:
    results = rank_pool(size).run(fp8_ranks.resume, timeout_s=90.0)
    for result in results:
        assert result["resumed"] == result["copied"] == result["expected"]
        assert result["history"] == results[0]["history"], "what travels has one history"
        assert result["recomputed"] == result["current"]
    sums = {
        key: [sum(losses) for losses in zip(*(r[key] for r in results), strict=True)] for key in ("current", "plain")
    }
    assert sums["current"] != sums["plain"]
    for mine, theirs in zip(sums["current"], sums["plain"], strict=True):
        assert mine == pytest.approx(theirs, rel=0.05)
    assert sums["current"][6] < sums["current"][0], "it learns: the same data, six steps later"


def test_saved_for_backward(rank_pool) -> None:
    for result in rank_pool(2).run(fp8_ranks.saved_for_backward, timeout_s=60.0):
        assert result["saved"] == [
            ("torch.uint8", (8, HIDDEN)),  # the same bytes, as they are sent again
            ("torch.float32", (1, 1)),
            ("torch.float8_e4m3fn", (HIDDEN, FEATURES)),
            ("torch.float32", (1, 1)),
        ]
    assert CAPACITY >= 16


@pytest.mark.parametrize("size", [2, 3])
def test_empty_and_infinite(rank_pool, size: int) -> None:
    rank_pool(size).run(fp8_ranks.empty_and_infinite, timeout_s=60.0)


@pytest.mark.parametrize("size", [2, 3])
def test_histories(rank_pool, size: int) -> None:
    results = rank_pool(size).run(fp8_ranks.histories, timeout_s=60.0)
    assert all(result == results[0] for result in results)
    assert results[0][3] == results[0][2] and results[0][2][0] > results[0][1][0] > 0
