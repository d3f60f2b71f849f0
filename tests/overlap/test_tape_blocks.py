"""Kernels that a tape starts see the parameters that they see without one."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable

import pytest

from tests.overlap import tape_block_ranks as functions
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(
        not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="tapes need a C compiler"
    ),
]


@pytest.mark.parametrize("counts", [(32, 32), (0, 40), (17, 0)], ids=str)
@pytest.mark.parametrize("num_weights", [1, 2, 3])
def test_launches_of_fused(rank_pool: Pools, num_weights: int, counts: tuple[int, ...]) -> None:
    """Weights of one shape share a prepared launch, each with addresses of its own."""
    for wrong, played in rank_pool(2).run(functions.fused_blocks, num_weights, counts, timeout_s=60):
        assert not wrong, "\n".join(wrong[:3])
        assert played >= 30, f"{played} tapes for 48 operations"


@pytest.mark.parametrize("counts", [(32, 32), (0, 40), (20, 7, 20), (20, 0, 20)], ids=str)
def test_exchange_kernels(rank_pool: Pools, counts: tuple[int, ...]) -> None:
    for wrong, played in rank_pool(len(counts)).run(functions.trade_blocks, counts, timeout_s=60):
        assert not wrong, "\n".join(wrong[:3])
        assert min(played.values()) >= 12, f"{played} of 18 operations each"
