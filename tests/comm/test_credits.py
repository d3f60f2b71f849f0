"""Where one stream does it all, peers are told of the operation, and rows are sent only after their credits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.comm import credit_ranks
from tpoverlap.testing import RankPool


@pytest.mark.parametrize("world_size", [2, 3])
def test_operations_on_one_stream_wait_for_every_credit(rank_pool: Callable[[int], RankPool], world_size: int) -> None:
    assert rank_pool(world_size).run(credit_ranks.waits_for_credits, timeout_s=30) == [True] * world_size
