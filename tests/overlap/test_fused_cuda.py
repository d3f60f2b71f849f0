"""`fused` and `use_ce: false` on GPUs; ranks share one where there are not enough."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.overlap import fused_ranks
from tpoverlap import fused_form
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


@pytest.mark.parametrize("form", fused_form.FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_every_t(pool: RankPool, dtype: torch.dtype, sizes: dict[str, Any], form: str) -> None:
    setting = Setting(device="cuda", dtype=dtype, **sizes)
    turns = setting.partitions(pool.world_size)
    for run in (fused_ranks.gather, fused_ranks.scatter):
        ran = pool.run(run, setting, turns, "fused", True, 1, False, 0.0, form, timeout_s=120)
        assert ran == [len(turns)] * pool.world_size


@pytest.mark.parametrize("form", fused_form.FORMS)
@pytest.mark.parametrize("sizes", SIZES)
def test_several_weights_and_late_rows(pool: RankPool, sizes: dict[str, Any], form: str) -> None:
    setting = Setting(device="cuda", dtype=torch.bfloat16, **sizes)
    turns = setting.partitions(pool.world_size)[::2]
    pool.run(fused_ranks.gather, setting, turns, "fused", True, 2, True, 0.002, form, timeout_s=120)
    pool.run(fused_ranks.scatter, setting, turns, "fused", True, 3, True, 0.002, form, timeout_s=120)


@pytest.mark.parametrize("form", fused_form.FORMS)
def test_more_tiles_than_programs(pool: RankPool, form: str) -> None:
    """Each program has several tiles, of several pieces: Triton 3.6 once let all of them count for the first piece."""
    setting = Setting(device="cuda", dtype=torch.bfloat16, capacity=4100, hidden=4096, features=512)
    turns = setting.partitions(pool.world_size)[:4]
    for run in (fused_ranks.gather, fused_ranks.scatter):
        pool.run(run, setting, turns, "fused", True, 1, False, 0.0, form, timeout_s=120)


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
