"""FP8 in the layers: near the same layer in float32, in both backward modes; options do not change a bit."""

from __future__ import annotations

import pytest

from tests.nn import fp8_layer_ranks


@pytest.mark.parametrize("mode", ["bulk", "rs_dgrad"])
@pytest.mark.parametrize("size", [2, 3])
def test_transformer_layer(rank_pool, size: int, mode: str) -> None:
    for errors in rank_pool(size).run(fp8_layer_ranks.transformer_layer, mode, timeout_s=90.0):
        assert {"y", "dx", "self_attention.proj.weight"} <= set(errors)
        # Each gradient went through up to four GEMMs with an E5M2 operand of 2**-3 per element, at random: 0.06 each.
        assert all(0 < error < 0.25 for error in errors.values()), errors
        assert errors["y"] < 0.1, errors


@pytest.mark.parametrize("size", [2, 3])
def test_options(rank_pool, size: int) -> None:
    for same in rank_pool(size).run(fp8_layer_ranks.options, timeout_s=90.0):
        assert all(same.values()) and len(same) == 4, same


def test_recomputed_under_autocast(rank_pool) -> None:
    for same in rank_pool(2).run(fp8_layer_ranks.recomputed_under_autocast, timeout_s=60.0):
        assert all(same.values()) and len(same) > 4, same


@pytest.mark.parametrize(("size", "sequence_parallel"), [(2, True), (3, True), (2, False)])
def test_recomputed_by_delayed_scaling(rank_pool, size: int, sequence_parallel: bool) -> None:
    ranks = fp8_layer_ranks.recomputed_by_delayed_scaling
    for same in rank_pool(size).run(ranks, sequence_parallel, timeout_s=60.0):
        assert all(same.values()) and any("amax_history" in name for name in same), same


def test_histories_wait_for_the_first_autocast(rank_pool) -> None:
    for same, message in rank_pool(2).run(fp8_layer_ranks.resumed_under_autocast, timeout_s=60.0):
        assert all(same.values()) and len(same) == 5, same
        assert "do not fit the recipe of this forward, DelayedScaling" in message and "amax_history_len=5" in message


@pytest.mark.parametrize(
    ("size", "recipe", "config"),
    [
        *((2, "current", config) for config in ("default", "fp8_buf", "rs_dgrad", "pipeline", "sequential")),
        (3, "delayed", "default"),
        (2, "delayed", "fp8_buf"),
        (3, "rowwise", "pipeline"),
        (4, "rowwise", "default"),
    ],
)
def test_without_sequence_parallelism(rank_pool, size: int, recipe: str, config: str) -> None:
    rank_pool(size).run(fp8_layer_ranks.without_sequence_parallelism, recipe, config, timeout_s=60.0)


@pytest.mark.parametrize("size", [2, 3])
def test_returned_norm_without_sequence_parallelism(rank_pool, size: int) -> None:
    for errors in rank_pool(size).run(fp8_layer_ranks.returned_norm_without_sequence_parallelism, timeout_s=60.0):
        assert len(errors) == 4 and max(errors.values()) < 1e-5, errors  # float32: nothing of it is quantised


def test_whole_layers(rank_pool) -> None:
    for same in rank_pool(2).run(fp8_layer_ranks.whole_layers, timeout_s=60.0):
        assert all(same.values()) and len(same) == 13, same


def test_sizes_are_checked_without_sequence_parallelism(rank_pool) -> None:
    for message in rank_pool(2).run(fp8_layer_ranks.whole_sizes_are_checked, timeout_s=30.0):
        assert "qkv: out_features 24 is not a multiple of 16" in message
