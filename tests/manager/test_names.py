"""Names and widths: registered, configured, missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.manager import name_ranks
from tests.manager.ranks import CAPACITY, WIDTH
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]


@pytest.mark.parametrize(("backend", "size"), [("shared", 2), ("shared", 3), ("process_group", 2)])
def test_register(rank_pool: Pools, backend: str, size: int) -> None:
    for result in rank_pool(size).run(name_ranks.register, backend, timeout_s=60.0):
        # narrow and short names share; wide, long and one-sided ones get an arena each; lm_head shares
        assert result["allocations"] == [0, 0, 1, 2, 3, 3]
        assert result["regions"] == [
            "ag",
            "ag-long",
            "ag-one_sided",
            "ag-wide",
            "rs",
            "rs-long",
            "rs-one_sided",
            "rs-wide",
        ]
        assert result["capacity"] is not None and result["capacity"][0][0] == "CapacityError"
        assert "narrow_fprop" in result["capacity"][1]
        assert result["wrong width"] is not None and result["wrong width"][0][0] == "ActiveShapeError"
        assert f"H={WIDTH + 1}" in result["wrong width"][1]
        assert result["shapes"]["long"] == (3 * CAPACITY, WIDTH)
        assert result["stats"]["narrow_fprop"]["method_ring_exchange"] == 2
        assert result["stats"]["narrow_fprop"]["method_sequential"] == 0
        assert result["stats"]["lm_head_dgrad"]["method_sequential"] == 1, "only lm_head_fprop was registered"


@pytest.mark.parametrize("size", [2, 3])
def test_own_names(rank_pool: Pools, size: int) -> None:
    for result in rank_pool(size).run(name_ranks.own_names, timeout_s=60.0):
        assert result["row of mtp"] and not result["row of plain"]
        for key in ("mtp as a column", "gate as a row"):
            assert result[key] is not None and result[key][0][0] == "ConfigError", result[key]
        assert result["same object"]
        stats = result["stats"]
        assert stats["mtp_fprop"]["method_pipeline"] == 1 and stats["mtp_dgrad"]["method_ring_exchange"] == 1
        assert stats["gate_fprop"]["method_ring_exchange"] == 1 and stats["gate_dgrad"]["method_bulk"] == 1
        assert stats["quiet_fprop"]["method_sequential"] == 1
        assert stats["plain_fprop"]["method_ring_exchange"] == 1 and stats["plain_wgrad"]["method_bulk"] == 1
        assert stats["free_dgrad"]["calls"] == 3 and "qkv_dgrad" not in stats


def test_unregistered(rank_pool: Pools) -> None:
    for result in rank_pool(2).run(name_ranks.unregistered, timeout_s=60.0):
        assert len(result["lines"]) == 2, f"one warning a layer: {result['lines']}"
        assert "vision" in result["lines"][0] and "mgr.register('vision'" in result["lines"][0]
        stats = result["stats"]
        for name, calls in (("vision_fprop", 5), ("vision_dgrad", 5), ("vision_wgrad", 2), ("audio_fprop", 2)):
            assert stats[name]["calls"] == stats[name]["method_sequential"] == calls, (name, stats[name])
        for name in ("qkv_fprop", "qkv_dgrad", "qkv_wgrad", "proj_fprop", "proj_dgrad"):
            assert stats[name]["method_sequential"] == 0 and stats[name]["calls"] == 2, (name, stats[name])
        assert "vision_fprop" not in result["plan"]
        assert result["get"] is not None and result["get"][0][0] == "ConfigError"


def test_mistyped(rank_pool: Pools) -> None:
    for result in rank_pool(2).run(name_ranks.mistyped, timeout_s=60.0):
        hints = ["(did you mean 'qkv'?)", "(did you mean 'fc2'?)", "(did you mean 'qkv'?)", None, None]
        assert len(result["lines"]) == len(hints), "one line a layer"
        for line, hint in zip(result["lines"], hints, strict=True):
            assert (hint in line) if hint else ("did you mean" not in line), line
        assert "qvk_fprop is not registered (did you mean 'qkv'?)" in result["explain"]["qvk"]
        assert "did you mean" not in result["explain"]["vision"]
        messages = {name: outcome[1] for name, outcome in result["get"].items()}
        assert {outcome[0][0] for outcome in result["get"].values()} == {"ConfigError"}
        for name, meant in (("qvk_fprop", "qkv_fprop"), ("qkv_fporp", "qkv_fprop"), ("mpt_dgrad", "mtp_dgrad")):
            assert f"no communicator is named {name!r} (did you mean {meant!r}?); registered: " in messages[name]
        assert "'qkv' is a layer: get one of its GEMMs, qkv_fprop, qkv_dgrad, qkv_wgrad" in messages["qkv"]
        for name in ("vision_fprop", "mtp_proj_fprop"):
            assert "did you mean" not in messages[name] and f"mgr.register({name!r}" in messages[name]


def test_used_both_ways(rank_pool: Pools) -> None:
    for stats in rank_pool(2).run(name_ranks.used_both_ways, timeout_s=60.0):
        assert stats["shared_fprop"]["calls"] == 4, stats["shared_fprop"]
        assert stats["shared_fprop"]["method_ring_exchange"] == 4


def test_from_file(rank_pool: Pools, tmp_path: Path) -> None:
    path = tmp_path / "ub.yaml"
    path.write_text(
        "proj_fprop: {method: pipeline, num_splits: 3, num_sm: 8}\n"
        "qkv_dgrad:\n  method: ring_exchange\n"
        "mla_down_fprop: {method: ring_exchange, is_reduce_scatter: 0}\n"
    )
    for result in rank_pool(2).run(name_ranks.from_file, str(path), timeout_s=60.0):
        stats = result["stats"]
        assert stats["proj_fprop"]["method_pipeline"] == 1
        assert stats["qkv_dgrad"]["method_ring_exchange"] == 1, "reduce-scatter inside dgrad"
        assert stats["qkv_dgrad"]["method_bulk"] == 1, "its gather, beside it"
        assert "qkv_wgrad" not in stats
        assert stats["mla_down_fprop"]["method_ring_exchange"] == 1
        assert "explicit" in result["explain"] and "num_sm" in result["explain"], "a key that pipeline ignores here"


def test_classes(rank_pool: Pools) -> None:
    expected = {
        "qkv_fprop": "CommOverlapP2P",
        "qkv_dgrad": "CommOverlap",
        "qkv_wgrad": "CommOverlap",
        "proj_fprop": "CommOverlap",
        "proj_dgrad": "CommOverlapP2P",
        "fc2_fprop": "CommOverlap",
    }
    assert rank_pool(2).run(name_ranks.classes, timeout_s=60.0) == [expected, expected]
