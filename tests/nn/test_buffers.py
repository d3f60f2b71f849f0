"""What autograd saves is never a view of a shared buffer; views that users take hold what they promise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.nn import buffer_ranks
from tpoverlap.testing import RankPool


@pytest.mark.parametrize("method", ["ring_exchange", "sequential"])
def test_gather_from_the_buffer(rank_pool: Callable[[int], RankPool], method: str) -> None:
    rank_pool(2).run(buffer_ranks.gather_from_the_buffer, method, timeout_s=60.0)


def test_view_of_gathered(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(2).run(buffer_ranks.view_of_gathered, timeout_s=60.0)


def test_other_inputs_from_the_buffer(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(2).run(buffer_ranks.other_inputs_from_the_buffer, timeout_s=60.0)


@pytest.mark.parametrize("backend", ["shared", "process_group"])
def test_staging_outlives_its_first_caller(rank_pool: Callable[[int], RankPool], backend: str) -> None:
    rank_pool(2).run(buffer_ranks.staging_outlives_its_first_caller, backend, timeout_s=60.0)
