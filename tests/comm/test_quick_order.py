"""Several streams of one rank: quick operations leave none of them behind, and none runs too far ahead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.comm import quick_order_ranks as functions
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_callers_stream_is_behind_all_that_it_relies_on(rank_pool: Pools, world_size: int) -> None:
    """Compares, arrivals and copies; also where a kernel moves the rows, which compares nothing."""
    for wrong in rank_pool(world_size).run(functions.joined, 8, timeout_s=60):
        assert not wrong, "\n".join(wrong[:3])
