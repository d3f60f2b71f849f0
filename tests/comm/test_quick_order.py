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


@pytest.mark.parametrize("others", [3, 40, 100])
def test_a_descriptor_is_not_told_far_ahead(rank_pool: Pools, others: int) -> None:
    """A ring of descriptors has 64; a host that runs ahead must not make the word stream overwrite unread ones."""
    for number in rank_pool(2).run(functions.ahead, others, timeout_s=60):
        assert number <= 16, f"published before the last {number} operations are over"


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_credit_does_not_follow_a_later_one(rank_pool: Pools, world_size: int) -> None:
    assert rank_pool(world_size).run(functions.late_credits, timeout_s=60) == [9] * world_size
