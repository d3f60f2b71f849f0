"""Rank functions of `test_dispatch_ranks`: what really runs, by the manager's own counts, with right numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.manager.ranks import CAPACITY, FEATURES, WIDTH, LogLines, assert_right, make_manager, outcome_of
from tpoverlap.method_tables import machine_of
from tpoverlap.plan import plan_hash
from tpoverlap.tokens import TokenPartition
from tpoverlap.tuning import Candidate, Evidence, Problem, Row, cache_file, entry_key, load_device, write_entries
from tpoverlap.tuning.device import Rate

SECTION: dict[str, Any] = {
    "qkv_fprop": {
        "features": FEATURES,
        "width": WIDTH,
        "rows": [
            {"up_to": 8, "method": "sequential", "time_us": 5.0, "sequential_us": 5.0, "overlap_us": 7.5},
            {"up_to": CAPACITY, "method": "ring_exchange", "time_us": 6.0, "sequential_us": 9.0},
        ],
    },
    "proj_fprop": {
        "features": FEATURES,
        "width": WIDTH,
        "instead_of": "ring_exchange",
        "rows": [
            {"up_to": 8, "method": "pipeline", "num_splits": 3},
            {"up_to": CAPACITY, "method": "sequential"},
        ],
    },
    "fc1_dgrad": {"features": FEATURES, "width": WIDTH, "rows": [{"up_to": CAPACITY, "method": "sequential"}]},
}


def methods_at(manager: Any, tokens: int, *layers: tuple[str | None, str | None]) -> dict[str, str]:
    """Run the layers at T and return, by name, the one method that was counted."""
    partition = TokenPartition.balanced(tokens, manager.tp_size)
    manager.set_active_shape(partition=partition)

    def run() -> None:
        for column, row in layers:
            assert_right(manager, partition, column, row, backward=True)

    return ran(manager, run)


def ran(manager: Any, run: Callable[[], None]) -> dict[str, str]:
    """By name, the one method that was counted while ``run`` ran."""
    before = {name: dict(row) for name, row in manager.stats().items()}
    run()
    found = {}
    for name, row_ in manager.stats().items():
        counted = [
            key.removeprefix("method_")
            for key, value in row_.items()
            if key.startswith("method_") and value > before.get(name, {}).get(key, 0)
        ]
        if counted:
            assert len(counted) == 1, (name, counted)
            found[name] = counted[0]
    return found


def by_section(rank: int, size: int) -> dict[str, Any]:
    """The section decides by T where nobody wrote a method; what was written stays."""
    layers = (("qkv", "proj"), ("fc1", "fc2"))
    with make_manager(ub_cfgs={"tpoverlap": {"by_tokens": SECTION}}) as manager:
        before = manager.explain("qkv_fprop", 3)
        results: dict[str, Any] = {"before": before, "small": methods_at(manager, 3, *layers)}
        results["large"] = methods_at(manager, 20, *layers)
        results["explain small"] = manager.explain("qkv_fprop", 3)
        results["explain large"] = manager.explain("qkv_fprop", 20)
        results["explain proj"] = manager.explain("proj_fprop", 3, features=FEATURES)
        results["explain other"] = manager.explain("qkv_fprop", 3, features=FEATURES + 1)
        results["plan"] = manager.plan()
    written = {
        "qkv_fprop": {"method": "ring_exchange"},
        "proj_fprop": {"method": "ring_exchange"},
        "fc1_dgrad": {"method": "bulk"},
    }
    with make_manager(ub_cfgs=written | {"tpoverlap": {"by_tokens": SECTION}}) as manager:
        results["written small"] = methods_at(manager, 3, *layers)
        results["written plan"] = manager.plan()["methods"]
    wide = {name: entry | {"features": FEATURES + 1} for name, entry in SECTION.items()}
    with make_manager(ub_cfgs={"tpoverlap": {"by_tokens": wide}}) as manager:
        results["another shape"] = methods_at(manager, 3, *layers)
    with make_manager(plan=json.loads(json.dumps(results["plan"]))) as manager:
        assert manager.plan() == results["plan"]
        results["pinned small"] = methods_at(manager, 3, *layers)
        results["pinned large"] = methods_at(manager, 20, *layers)
    return results


def by_cache(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Only rank 0 has the cache; all ranks follow it. A broken one is said and not used."""
    machine = machine_of(torch.device("cpu"), "shared")
    problem = Problem("gather", 1, WIDTH, FEATURES, size, 4)
    rows = [Row(8, Candidate("sequential"), 1.0, 1.0, 2.0), Row(CAPACITY, Candidate("ring_exchange"), 2.0, 3.0)]
    mine = Path(folder) / f"rank{rank}"
    if rank == 0:
        write_entries(mine, machine, {entry_key(problem): rows})
    results: dict[str, Any] = {}
    with make_manager(tuning_cache=mine) as manager:
        results["small"], results["large"] = (methods_at(manager, tokens, ("qkv", None)) for tokens in (3, 20))
        results["explain"] = manager.explain("qkv_fprop", 3)
    with make_manager(tuning_cache=False) as manager:
        results["off"] = methods_at(manager, 3, ("qkv", None))
    with make_manager(tuning_cache=mine, ub_cfgs={"qkv_fprop": {"method": "ring_exchange"}}) as manager:
        results["written"] = methods_at(manager, 3, ("qkv", None))
    if rank == 0:
        cache_file(mine, machine).write_text("{")
    with LogLines() as log, make_manager(tuning_cache=mine) as manager:
        results["broken"] = methods_at(manager, 3, ("qkv", None))
        results["broken lines"] = log.having("cannot read the tuned cache")
    return results


def by_model(rank: int, size: int) -> dict[str, Any]:
    """A plan that rests on a device: one whose copies take as long as its GEMMs, one whose launches take a second."""
    results: dict[str, Any] = {}
    with make_manager() as manager:
        plan = manager.plan()
    h200 = replace(load_device("h200"), host_us={})
    by_memory = replace(h200.gemm, launch_us=0.0, tile_us_per_k=0.0, tile_fixed_us=0.0)
    devices = {
        "slow copies": replace(h200, gemm=by_memory, memory_gb_s=1e-3, copy=Rate(0.0, 3e-4), trade=None),
        "slow launches": replace(h200, gemm=replace(h200.gemm, launch_us=1e6), trade=h200.exchange),
    }
    for label, device in devices.items():
        content = plan | {"by_tokens": Evidence(device=device).to_dict()}
        content["methods"] = {name: row | {"method": "auto"} for name, row in plan["methods"].items()}
        content["methods"]["fc1_fprop"] = plan["methods"]["fc1_fprop"]
        pinned = content | {"hash": plan_hash(content)}
        with make_manager(plan=pinned) as manager:
            results[label] = methods_at(manager, 20, ("qkv", None), ("fc1", None))
            results[f"{label} explain"] = manager.explain("qkv_fprop", 20)
    return results


def different_evidence(rank: int, size: int) -> Any:
    """Ranks with different sections, and with different plans: refused before anybody waits."""
    mine = {name: entry for name, entry in SECTION.items() if rank or name != "qkv_fprop"}
    return outcome_of(lambda: make_manager(ub_cfgs={"tpoverlap": {"by_tokens": mine}}))
