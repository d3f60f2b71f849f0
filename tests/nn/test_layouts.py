"""Shards, inputs, weights, operands and gradients that are not contiguous are handled, never wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.nn import layout_ranks
from tpoverlap.testing import RankPool


@pytest.mark.parametrize("method", ["ring_exchange", "sequential"])
@pytest.mark.parametrize("backend", ["shared", "process_group"])
def test_layouts(rank_pool: Callable[[int], RankPool], backend: str, method: str) -> None:
    rank_pool(2).run(layout_ranks.run, backend, method, timeout_s=60.0)
