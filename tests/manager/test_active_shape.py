"""What the active shape is, who may say it, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.manager import active_shape_ranks
from tpoverlap.testing import RankPool

FUNCTIONS = [
    active_shape_ranks.forms,
    active_shape_ranks.getters_before_any_shape,
    active_shape_ranks.buffers,
    active_shape_ranks.scopes,
    active_shape_ranks.one_name,
    active_shape_ranks.order_of_resolution,
    active_shape_ranks.backward_keeps_its_partition,
]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_active_shape(rank_pool: Callable[[int], RankPool], function: Callable[..., Any], size: int) -> None:
    rank_pool(size).run(function, timeout_s=60.0)
