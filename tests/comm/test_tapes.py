"""Operations that C plays from a tape: same results, same calls in the same order, same errors."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from tests.comm import tape_ranks as functions
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]
pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="tapes need a C compiler"
)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_results(rank_pool: Pools, world_size: int, pieces: bool, biased: bool) -> None:
    for played, operations in rank_pool(world_size).run(functions.train, 60, pieces, biased, timeout_s=120):
        assert played > operations // 4, f"{played} tapes for {operations} operations"
