"""Operations that C plays from a tape, on GPUs; ranks share one where there are not enough."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.comm import tape_ranks as functions
from tpoverlap.testing import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
METHODS = {
    "ring": {"qkv_fprop": {"method": "ring_exchange"}, "fc2_fprop": {"method": "ring_exchange"}},
    "sequential": {
        "qkv_fprop": {"method": "sequential"},
        "fc2_fprop": {"method": "sequential"},
        "fc2_dgrad": {"method": "sequential"},
    },
    "fused": {"qkv_fprop": {"method": "fused"}, "fc2_fprop": {"method": "fused"}, "fc2_dgrad": {"method": "fused"}},
    "auto": {},
}
TOKENS = (1030, 16, 300, 1)


@pytest.fixture(scope="module", params=[2])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param, device="cuda") as started:
        yield started


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_results(pool: RankPool, method: str, biased: bool) -> None:
    for played in pool.run(functions.train_on_gpus, METHODS[method], 60, TOKENS, biased, timeout_s=120):
        assert played > 60 or method in ("auto", "fused"), f"{played} tapes"


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("method", ["ring", "sequential"])
def test_the_same_bits(pool: RankPool, method: str, fp8: bool) -> None:
    for played in pool.run(functions.repeats, METHODS[method], 40, (1030, 16, 300), fp8, timeout_s=120):
        assert played > 40, f"{played} tapes"
