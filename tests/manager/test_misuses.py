"""Bad input that a rank can see by itself: the right exception, a message that helps, and nothing lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.manager import misuse_ranks
from tests.manager.misuses import MISUSES
from tests.manager.ranks import Outcome
from tpoverlap.testing import RankPool

Outcomes = list[dict[str, Outcome]]

# backend, offender (None: every rank), R
RUNS = {
    "all ranks": ("shared", None, 2),
    "one rank": ("shared", 1, 2),
    "one rank of three, by messages": ("process_group", 2, 3),
}


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, rank_pool: Callable[[int], RankPool]) -> tuple[int | None, Outcomes]:
    backend, offender, size = RUNS[request.param]
    return offender, rank_pool(size).run(misuse_ranks.commit, backend, offender, timeout_s=90.0)


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name: str, run: tuple[int | None, Outcomes]) -> None:
    offender, outcomes = run
    misuse = MISUSES[name]
    for rank, on_rank in enumerate(outcomes):
        if offender is not None and rank != offender:
            assert name not in on_rank, f"rank {rank} did nothing wrong"
            continue
        outcome = on_rank[name]
        assert outcome is not None, f"rank {rank}: nothing was raised"
        classes, message = outcome
        assert classes[0] == misuse.error, f"rank {rank}: {classes[0]}: {message}"
        assert "ValueError" in classes and "TpOverlapError" in classes
        for fragment in misuse.says:
            assert fragment in message, f"rank {rank}: {fragment!r} is not in: {message}"
