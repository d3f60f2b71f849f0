"""`fused` and `use_ce: false` on GPUs; ranks share one where there are not enough."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.overlap import fused_ranks
from tpoverlap.testing import RankPool
from tpoverlap.testing.conformance.setting import Setting

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [
    pytest.param({"capacity": 260, "hidden": 24, "features": 20}, id="unaligned"),
    pytest.param({"capacity": 1030, "hidden": 256, "features": 320}, id="aligned"),
]


@pytest.fixture(scope="module", params=[2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param, device="cuda") as started:
        yield started


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_every_t(pool: RankPool, dtype: torch.dtype, sizes: dict[str, Any]) -> None:
    setting = Setting(device="cuda", dtype=dtype, **sizes)
    turns = setting.partitions(pool.world_size)
    assert pool.run(fused_ranks.gather, setting, turns, timeout_s=120) == [len(turns)] * pool.world_size
    assert pool.run(fused_ranks.scatter, setting, turns, timeout_s=120) == [len(turns)] * pool.world_size


@pytest.mark.parametrize("sizes", SIZES)
def test_several_weights_and_late_rows(pool: RankPool, sizes: dict[str, Any]) -> None:
    setting = Setting(device="cuda", dtype=torch.bfloat16, **sizes)
    turns = setting.partitions(pool.world_size)[::2]
    pool.run(fused_ranks.gather, setting, turns, "fused", True, 2, True, 0.002, timeout_s=120)
    pool.run(fused_ranks.scatter, setting, turns, "fused", True, 3, True, 0.002, timeout_s=120)


@pytest.mark.parametrize("method", ["ring_exchange", "fused"])
def test_copy_programs(pool: RankPool, method: str) -> None:
    setting = Setting(device="cuda", dtype=torch.bfloat16, capacity=1030, hidden=256, features=320)
    turns = setting.partitions(pool.world_size)[::2]
    pool.run(fused_ranks.gather, setting, turns, method, False, timeout_s=120)
    pool.run(fused_ranks.scatter, setting, turns, method, False, timeout_s=120)
    pool.run(fused_ranks.bulk_by_programs, setting, turns, timeout_s=120)


def test_a_peer_that_never_comes_is_an_error(pool: RankPool) -> None:
    if pool.world_size != 2:
        pytest.skip("one rank stays away from one other")
    setting = Setting(device="cuda", dtype=torch.bfloat16, capacity=1030, hidden=256, features=320, timeout_s=3.0)
    message, _ = pool.run(fused_ranks.peer_never_comes, setting, timeout_s=60)
    assert message.startswith("PeerTimeoutError")
