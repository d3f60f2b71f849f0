"""The plan: the same on every rank, through JSON and back, pinned and honoured, logged once."""

from __future__ import annotations

from collections.abc import Callable

from tests.manager import report_ranks
from tests.manager.set_ups import a_plan
from tpoverlap.plan import plan_hash
from tpoverlap.testing import RankPool


def test_round_trip(rank_pool: Callable[[int], RankPool]) -> None:
    results = rank_pool(2).run(report_ranks.plan_round_trip, timeout_s=60.0)
    for rank, result in enumerate(results):
        plan = result["plan"]
        assert plan == results[0]["plan"], "every rank has the same"
        assert plan["methods"]["proj_fprop"] == {"method": "pipeline", "is_reduce_scatter": True}
        assert plan["hash"] == plan_hash(plan) != result["default plan"]["hash"]
        assert len(result["lines"]) == (1 if rank == 0 else 0), "logged once, by rank 0"
        if rank == 0:
            assert plan["hash"] in result["lines"][0] and "pipeline" in result["lines"][0]
        stats = result["stats"]
        assert stats["proj_fprop"]["method_pipeline"] == 1
        for name in ("fc1_fprop", "qkv_dgrad", "qkv_wgrad"):
            assert stats[name]["method_sequential"] == stats[name]["calls"] == 1, (name, stats[name])
        assert stats["fc1_dgrad"]["method_bulk"] == 1, "not pinned to anything but its default"
        assert "pipeline" in result["explain"] and "plan" in result["explain"] and "plan=" in result["explain"]
        assert result["later"]["method_sequential"] == 1


def test_hash_covers_everything_but_itself() -> None:
    plan = a_plan(2, proj_fprop=("pipeline", True))
    for key, value in {"version": 2, "tp_size": 3, "capacity_shape": [1, 1], "methods": {}}.items():
        assert plan_hash(plan | {key: value}) != plan["hash"], key
    assert plan_hash(plan | {"hash": "something else"}) == plan["hash"]
