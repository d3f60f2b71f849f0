"""Ranks whose Triton interprets, shared by the files here: importing torch and Triton takes longer than a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tpoverlap.testing import RankPool


@pytest.fixture(scope="session")
def interpreted_pool() -> Iterator[Callable[[int], RankPool]]:
    """``interpreted_pool(R)``: as ``rank_pool(R)``, with ``TRITON_INTERPRET=1``."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size, env={"TRITON_INTERPRET": "1"})
        return pools[world_size]

    yield pool
    for started in pools.values():
        started.close()
