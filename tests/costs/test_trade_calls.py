"""How much the host does for a `sequential` operation whose exchange is one kernel, whatever the machine's load."""

from __future__ import annotations

from collections.abc import Callable

from tests.costs import trade_call_ranks
from tpoverlap.testing import RankPool

DRIVER: dict[str, dict[str, int]] = {"all-gather": {"follow": 1, "submit": 1}, "reduce-scatter": {}}
"""Calls of the driver beside one kernel of ours and torch's GEMM."""
PYTHON = {"all-gather": 53, "reduce-scatter": 47}
"""Upper bounds of Python calls, all checks and the counting drivers' included."""


def test_calls_of_an_operation(rank_pool: Callable[[int], RankPool]) -> None:
    for rank, counted in enumerate(rank_pool(2).run(trade_call_ranks.trade_calls, 200, timeout_s=60)):
        for name, found in counted.items():
            print(f"rank {rank}, {name}: {found}")
            assert found.starts == 1 and found.calls.driver == DRIVER[name], name
            assert found.calls.python <= PYTHON[name], f"{name}: {found.calls.python} Python calls"
