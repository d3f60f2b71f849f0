"""`sequential` whose exchange is one kernel, on GPUs; ranks share one where there are not enough."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.overlap import trade_ranks
from tpoverlap.testing import RankPool
from tpoverlap.testing.conformance.setting import Setting

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SIZES = [
    pytest.param({"capacity": 260, "hidden": 23, "features": 20}, id="unaligned"),
    pytest.param({"capacity": 1030, "hidden": 256, "features": 320}, id="aligned"),
    pytest.param({"capacity": 512, "hidden": 4096, "features": 1024}, id="large"),
]


@pytest.fixture(scope="module", params=[2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param, device="cuda") as started:
        yield started


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_t(pool: RankPool, dtype: torch.dtype, sizes: dict[str, Any]) -> None:
    setting = Setting(device="cuda", dtype=dtype, **sizes)
    turns = setting.partitions(pool.world_size)
    assert pool.run(trade_ranks.conform, setting, turns, timeout_s=120) == [True] * pool.world_size


def test_several_terms(pool: RankPool) -> None:
    setting = Setting(device="cuda", dtype=torch.bfloat16, capacity=260, hidden=256, features=320)
    turns = setting.partitions(pool.world_size)[::3]
    assert pool.run(trade_ranks.conform, setting, turns, 2, timeout_s=120) == [True] * pool.world_size


def test_many_in_a_row(pool: RankPool) -> None:
    """Queued without a look at the results: every slot is used again and again while peers run ahead or behind."""
    setting = Setting(device="cuda", dtype=torch.bfloat16, capacity=256, hidden=512, features=64)
    assert pool.run(trade_ranks.many, setting, 150, timeout_s=120) == [True] * pool.world_size


def test_a_peer_that_never_comes_is_an_error(pool: RankPool) -> None:
    if pool.world_size != 2:
        pytest.skip("one rank stays away from one other")
    setting = Setting(device="cuda", dtype=torch.bfloat16, capacity=1030, hidden=256, features=320, timeout_s=3.0)
    for scatter in (False, True):
        message, _ = pool.run(trade_ranks.stays_away, setting, scatter, timeout_s=60)
        assert message.startswith("PeerTimeoutError"), message


@pytest.mark.parametrize("scatter", [False, True])
def test_another_t_is_an_error_on_every_rank(pool: RankPool, scatter: bool) -> None:
    setting = Setting(device="cuda", dtype=torch.bfloat16, capacity=1030, hidden=256, features=320, timeout_s=5.0)
    for message in pool.run(trade_ranks.another_t, setting, scatter, timeout_s=60):
        assert message.startswith("RankMismatchError"), message
