"""Layers tell which of their parameters are replicated, also when they are copied, and which are cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.nn import replicated_ranks
from tpoverlap.testing import RankPool


def test_copied_layers_are_synchronised(rank_pool: Callable[[int], RankPool]) -> None:
    for found in rank_pool(2).run(replicated_ranks.copied_layers_are_synchronised, timeout_s=60):
        assert {name: len(same) for name, same in found.items()} == {"layer": 2, "deep copy": 2, "made anew": 2}
        assert all(all(same) for same in found.values()), found


@pytest.mark.parametrize(("size", "sequence_parallel"), [(2, True), (3, False)])
def test_gradient_norm_by_megatrons_flags(
    rank_pool: Callable[[int], RankPool], size: int, sequence_parallel: bool
) -> None:
    for norms in rank_pool(size).run(replicated_ranks.counted_once, sequence_parallel, timeout_s=60):
        assert norms["found"] == pytest.approx(norms["expected"], rel=1e-5)
