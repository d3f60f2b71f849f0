"""1,000 random T in a row: nothing is allocated after set-up and nothing grows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.costs import growth_ranks
from tpoverlap.testing import RankPool

RSS_BOUND_BYTES = 8 << 20
"""malloc keeps what it likes of the sizes that it has seen. One [T, H] tensor lost a microbatch would be 128 MiB."""


@pytest.mark.parametrize(("backend", "steps", "warm_up"), [("shared", 1000, 200), ("process_group", 60, 60)])
def test_nothing_grows(rank_pool: Callable[[int], RankPool], backend: str, steps: int, warm_up: int) -> None:
    results = rank_pool(2).run(growth_ranks.microbatches, backend, steps, warm_up, timeout_s=110.0)
    for rank, result in enumerate(results):
        before, after = dict(result["before"]), dict(result["after"])
        assert result["different"] > steps // 3, "T has to change"
        growth = after.pop("rss_bytes") - before.pop("rss_bytes")
        print(f"{backend}, rank {rank}: RSS grew by {growth / 1024:.0f} KiB over {steps} microbatches; {after}")
        assert growth < RSS_BOUND_BYTES
        assert after == before
        assert after["allocations"] == 1
        assert after["mappings"] == (2 if backend == "shared" else 0), "one arena a rank, mapped once"
        assert not result["lines"], f"nothing to report in a steady state: {result['lines']}"
