"""Copies of layers keep telling which of their parameters are replicated."""

from __future__ import annotations

from collections.abc import Callable

from tests.nn import replicated_ranks
from tpoverlap.testing import RankPool


def test_copied_layers_are_synchronised(rank_pool: Callable[[int], RankPool]) -> None:
    for found in rank_pool(2).run(replicated_ranks.copied_layers_are_synchronised, timeout_s=60):
        assert {name: len(same) for name, same in found.items()} == {"layer": 2, "deep copy": 2, "made anew": 2}
        assert all(all(same) for same in found.values()), found
