"""Ring and bulk operations in few calls of Python: the same words as `DeviceExchange`, and ranks of both kinds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.comm import quick_ring_ranks as functions
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_streams_are_given_the_same(rank_pool: Pools, world_size: int, narrow: bool) -> None:
    """Any rows, one piece or several, with and without the gathered rows."""
    for wrong in rank_pool(world_size).run(functions.same_words, 12, narrow, timeout_s=60):
        assert not wrong, "\n".join(wrong[:3])
