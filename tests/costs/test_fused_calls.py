"""How much the host does to launch the kernels of `fused`, in numbers that do not depend on the machine's load."""

from __future__ import annotations

from collections.abc import Callable

from tests.costs import fused_call_ranks, launch_calls
from tpoverlap.testing import RankPool

LAUNCH = {"gather": 9, "partial_rows": 14, "own_rows": 9, "scatter": 9}
"""Upper bounds of Python calls of one launch, prepared before; addresses differ from call to call. The null driver's
and the test's own ones are included."""
OPERATION = {
    "engine all_gather": 25,
    "engine reduce_scatter": 25,
    "one_launch all_gather": 25,
    "one_launch reduce_scatter": 25,
}
"""Upper bounds of Python calls of the launch part of one operation at R = 2 and one piece."""


def test_calls_of_a_launch() -> None:
    with launch_calls.launches() as made:
        for name, work in made.by_name.items():
            for _ in range(20):
                work()
            before = made.driver.starts, made.driver.encodes
            for _ in range(6):
                work()
            assert made.driver.starts - before[0] == 6, "one call of the driver each"
            assert made.driver.encodes == before[1], "every tensor map is found again"
            python, c = launch_calls.count(work)
            print(f"{name}: {python} Python calls, {c} C calls, {launch_calls.time_us(work, 300):.1f} us")
            assert python <= LAUNCH[name.removeprefix("fp8 ")], f"{name}: {python} Python calls"


def test_calls_of_an_operation(rank_pool: Callable[[int], RankPool]) -> None:
    for rank, counted in enumerate(rank_pool(2).run(fused_call_ranks.fused_calls, 200, timeout_s=60)):
        for name, calls in counted.items():
            print(f"rank {rank}, {name}: {calls}")
            assert calls.starts == (2 if name == "engine reduce_scatter" else 1), name
            assert calls.launch <= OPERATION[name], f"{name}: {calls.launch} Python calls"
