"""How every file here runs a case: on the session's ranks, with a hard time-out, and never without a comparison."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tpoverlap.testing import RankPool
from tpoverlap.testing.conformance import Case

TIMEOUT_S = 60.0


@pytest.fixture
def run_cases(rank_pool: Callable[[int], RankPool]) -> Callable[[int, list[Case]], None]:
    def run(size: int, cases: list[Case]) -> None:
        for case in cases:
            try:
                summaries = rank_pool(size).run(case.check, *case.args, timeout_s=TIMEOUT_S)
            except Exception as error:
                error.add_note(f"in case {case.id} (CONFORMANCE.md, {case.number})")
                raise
            assert all(summary["comparisons"] > 0 for summary in summaries), case.id

    return run
