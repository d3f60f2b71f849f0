"""FP8 rows and scales through the code for GPUs, on a simulated device: byte rows, four-byte rows, packed rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.nn import fp8_ranks
from tpoverlap.testing import RankPool
from tpoverlap.testing.conformance import Setting
from tpoverlap.testing.conformance.fp8 import check_column, check_mixed, check_row
from tpoverlap.testing.simulated import SimulatedBackend

SETTING = Setting(
    dtype=torch.bfloat16,
    backend=SimulatedBackend,  # type: ignore[arg-type]
    hidden=48,
    features=16,
    capacity=40,
)


@pytest.mark.parametrize(
    ("size", "check", "arguments"),
    [
        (2, check_column, ("current", "bulk", 2)),
        (2, check_column, ("delayed", "dgrad_pipeline_fp8_buf", 1)),
        (3, check_column, ("rowwise", "dgrad_ring_fp8_buf", 1)),
        (2, check_row, ("current", "ring_fp8_buf")),
        (3, check_row, ("rowwise", "pipeline_fp8_buf")),
        (2, check_mixed, ()),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else getattr(value, "__name__", None),
)
def test_on_a_simulated_device(
    rank_pool: Callable[[int], RankPool], size: int, check: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    for summary in rank_pool(size).run(check, SETTING, *arguments, timeout_s=60.0):
        assert summary["comparisons"] > 0


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_magnitudes_of_several_parts(rank_pool: Callable[[int], RankPool], recipe: str) -> None:
    for summary in rank_pool(2).run(fp8_ranks.check_in_parts, check_column, SETTING, recipe, "bulk", 1, timeout_s=60.0):
        assert summary["comparisons"] > 0
