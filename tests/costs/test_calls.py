"""How much the host does for one operation on a device, in numbers that do not depend on the machine's load."""

from __future__ import annotations

from collections.abc import Callable

from tests.costs import call_ranks
from tpoverlap.testing import RankPool

DRIVER = {
    "ring all-gather": {"submit": 4, "follow": 3, "copy": 1},
    "ring reduce-scatter": {"submit": 4, "follow": 3, "copy": 1},
    "ring reduce-scatter, two pieces": {"submit": 7, "follow": 6, "copy": 2},
    "bulk all-gather": {"submit": 4, "follow": 3, "copy": 2},
    "bulk reduce-scatter": {"submit": 4, "follow": 3, "copy": 1},
    "sequential all-gather": {"submit": 3, "copy": 2},
    "sequential reduce-scatter": {"submit": 3, "copy": 1},
}
"""Calls of the driver at R = 2; `tpoverlap.comm.device_exchange` lists those of a gather."""
PYTHON = {
    "ring all-gather": 60,
    "ring reduce-scatter": 64,
    "ring reduce-scatter, two pieces": 75,
    "bulk all-gather": 70,
    "bulk reduce-scatter": 70,
    "sequential all-gather": 88,
    "sequential reduce-scatter": 87,
}
"""Upper bounds of Python calls, all checks, torch's own Python and the counting driver's included, where
nothing is played from a tape (`test_tape_calls`)."""


def test_calls_of_an_operation(rank_pool: Callable[[int], RankPool]) -> None:
    for rank, counted in enumerate(rank_pool(2).run(call_ranks.calls, 200, timeout_s=60)):
        for name, calls in counted.items():
            print(f"rank {rank}, {name}: {calls}")
            assert calls.driver == DRIVER[name], name
            assert calls.python <= PYTHON[name], f"{name}: {calls.python} Python calls"
