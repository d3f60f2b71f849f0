"""explain, stats and memory_report say what is true."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest
import torch

import tpoverlap as tpo
from tests.manager import report_ranks
from tests.manager.ranks import CAPACITY, WIDTH
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]


@pytest.mark.parametrize("backend", ["auto", "shared", "process_group"])
def test_explain(rank_pool: Pools, backend: str) -> None:
    for texts in rank_pool(2).run(report_ranks.explanations, backend, timeout_s=60.0):
        expected = {
            "qkv_fprop": ("ring_exchange (all-gather)", "default"),
            "qkv_dgrad": ("bulk (all-gather)", "default"),
            "proj_fprop": ("pipeline (reduce-scatter)", "explicit", "num_sm"),
            "fc1_fprop": ("sequential (all-gather)", "explicit"),
            "fc2_fprop": ("ring_exchange (reduce-scatter)", "auto"),
        }
        for name, fragments in expected.items():
            where = f"backend: {'process_group' if backend == 'process_group' else 'shared'}"
            for fragment in (*fragments, f"{name} at T=7", "[4, 3]", "[7, 16]", where):
                assert fragment in texts[name], f"{fragment!r} is not in: {texts[name]}"
        why = "first for cpu whose probe passed" if backend == "auto" else f"backend={backend!r} was asked for"
        assert why in texts["qkv_fprop"]
        assert "CapacityError" in texts["too large"] and "T=25" in texts["too large"]
        assert "T=24" in texts["no shape"]
        assert "T=7" in texts["active shape"] and "[1, 6]" in texts["active shape"], texts["active shape"]


def test_explain_counts_fp8_bytes(rank_pool: Pools) -> None:
    """T = 7, H = 16: 448 bytes in float32, 112 with one byte an element."""
    for texts in rank_pool(2).run(report_ranks.fp8_explanations, timeout_s=60.0):
        assert all("[7, 16], 448 bytes" in text for text in texts.values()), texts
        for name, says in {
            "qkv_fprop": "under an FP8 recipe: 112 bytes, one an element, and the scales: 4 bytes a tensor",
            "proj_fprop": "under an FP8 recipe: 140 bytes, one an element and 4 a row for its scale",
            "fc1_fprop": "under an FP8 recipe: 112 bytes, one an element",
            "fc1_dgrad": "under an FP8 recipe: 448 bytes still, the sums move in float32: fused adds in it",
            "fc2_fprop": "under an FP8 recipe: 448 bytes still, the sums move in float32: fp8_buf is false",
        }.items():
            assert says in texts[name], texts[name]
            assert "chosen by" in texts[name].partition("under an FP8 recipe")[2], "FP8 is decided by itself"
    for texts in rank_pool(2).run(report_ranks.explanations, "auto", timeout_s=60.0):
        assert "FP8" not in texts["qkv_fprop"], "this manager has no such mode"


def test_stats(rank_pool: Pools) -> None:
    for stats in rank_pool(2).run(report_ranks.counted, timeout_s=60.0):
        assert set(stats) == {"qkv_fprop", "qkv_dgrad", "qkv_wgrad"}, "only names that were called"
        assert stats["qkv_fprop"] == {
            "calls": 4,
            "tokens": 32,
            "overflow": 0,
            "method_ring_exchange": 4,
            "method_sequential": 0,
            "tokens_le_3": 2,
            "tokens_le_6": 1,
            **{f"tokens_le_{upper}": 0 for upper in (9, 12, 15, 18, 21)},
            "tokens_le_24": 1,
            "tokens_above_capacity": 0,
        }
        assert stats["qkv_wgrad"]["method_bulk"] == stats["qkv_wgrad"]["calls"] == 1


@pytest.mark.parametrize(("backend", "size"), [("shared", 2), ("shared", 3), ("process_group", 2)])
def test_memory_report(rank_pool: Pools, backend: str, size: int) -> None:
    for reports in rank_pool(size).run(report_ranks.reported, backend, timeout_s=60.0):
        for name, each in reports.items():
            report, estimate = each["report"], each["estimate"]
            assert report["backend"] == backend and report["allocations"] == 1
            assert report["regions"] == estimate["regions"], name
            assert report["control_bytes"] == estimate["control_bytes"]
            # Shared memory comes in whole pages; nothing else may be on top.
            assert 0 <= report["symmetric_bytes"] - estimate["symmetric_bytes"] < mmap.PAGESIZE
            assert report["transient_staging_bytes"] == estimate["staging_bytes"]
            assert report["staging_bytes"] == 0
            after = each["after"]
            assert after["staging_bytes"] == estimate["staging_bytes"], "what copy_into_buffer took is reported"
            assert after | {"staging_bytes": 0} == report


def test_all_staging_is_reported(rank_pool: Pools) -> None:
    elements = CAPACITY * WIDTH
    for held in rank_pool(2).run(report_ranks.staged, timeout_s=60.0):
        # float32, then one byte an element, then nothing new twice, then the unregistered name's float32
        assert held == [4 * elements, 5 * elements, 5 * elements, 5 * elements, 9 * elements]


@pytest.mark.parametrize("tp_size", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("capacity_shape", [(8192, 8192), (8191, 4096), (131072, 16384), (1, 1)])
def test_memory_bound(capacity_shape: tuple[int, int], tp_size: int) -> None:
    """The issue's bound: all twelve names at bf16 take at most 8 C H bytes and 1 MiB a rank; TE takes 24 C H."""
    tokens, width = capacity_shape
    estimate = tpo.memory_estimate(capacity_shape, tp_size)
    rounded_up = 2 * tp_size * width * 2  # ceil(C / R) rows from each peer, two slots: at most R - 1 rows too many
    assert estimate["symmetric_bytes"] <= 8 * tokens * width + (1 << 20) + rounded_up
    assert estimate["transformer_engine_bytes"] == 24 * tokens * width
    assert estimate["symmetric_bytes"] >= sum(estimate["regions"].values())


def test_memory_estimate_alone() -> None:
    assert tpo.memory_estimate((24, 16), 1)["symmetric_bytes"] == 0
    small = tpo.memory_estimate((24, 16), 2, dtype=torch.float32)
    assert small["regions"] == {"ag": 2 * 24 * 16 * 4, "rs": 2 * 12 * 16 * 4}
    assert (
        tpo.memory_estimate((24, 16), 2, dtype=torch.float32, max_rows_per_rank=24)["regions"]["rs"] == 2 * 24 * 16 * 4
    )
    # 64-bit arithmetic: above 2**31 elements, and nothing is allocated
    large = tpo.memory_estimate((1 << 20, 1 << 14), 2)
    assert large["regions"]["ag"] == 2 << 35


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (((24,), 2), tpo.ActiveShapeError, "(C, H)"),
        (((24, 0), 2), tpo.ActiveShapeError, "(24, 0)"),
        (((24, 16), 0), tpo.ConfigError, "tp_size"),
        (((24, 16), 2, {"qkv_fprop": {"method": "pipeline"}}), tpo.ConfigError, "cannot all-gather"),
    ],
)
def test_memory_estimate_refuses(arguments: tuple[object, ...], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        tpo.memory_estimate(*arguments)  # type: ignore[arg-type]
    assert says in str(caught.value)
