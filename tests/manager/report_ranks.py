"""Rank functions of `test_plan` and `test_reports`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch

import tpoverlap as tpo
from tests.manager.ranks import CAPACITY, WIDTH, LogLines, assert_right, make_manager, seeded
from tpoverlap.tokens import TokenPartition

CONFIG = {
    "proj_fprop": {"method": "pipeline", "num_splits": 3},
    "qkv_dgrad": {"method": "sequential"},
    "qkv_wgrad": {"method": "sequential"},
    "fc1_fprop": {"method": "sequential"},
}


def plan_round_trip(rank: int, size: int) -> dict[str, Any]:
    """A plan goes through JSON and pins another manager, which has no configuration, to the same methods."""
    partition = TokenPartition.balanced(7, size)
    with LogLines() as log:
        first = make_manager(ub_cfgs=CONFIG)
    with first:
        plan = first.plan()
        assert plan == first.plan()
    read = json.loads(json.dumps(plan))
    assert read == plan
    results: dict[str, Any] = {"plan": plan, "lines": log.having("plan ")}
    with make_manager(plan=read) as manager:
        assert manager.plan() == plan, "the same methods, so the same hash"
        manager.set_active_shape(partition)
        for layer in ("qkv", "fc1"):
            assert_right(manager, partition, layer, None, backward=True)
        assert_right(manager, partition, None, "proj", backward=True)
        results |= {"stats": manager.stats(), "explain": manager.explain("proj_fprop", 7)}
    with make_manager() as manager:
        results["default plan"] = manager.plan()
    # Names of the plan that are registered later are pinned then.
    with make_manager(ub_cfgs={"mtp_fprop": {"method": "sequential", "is_reduce_scatter": False}}) as manager:
        later = manager.plan()
    with make_manager(plan=later) as manager:
        manager.register("mtp", width=WIDTH)
        assert_right(manager, partition, "mtp", None, by_call=True)
        results["later"] = manager.stats()["mtp_fprop"]
    return results


def explanations(rank: int, size: int, backend: str) -> dict[str, str]:
    config = {
        "proj_fprop": {"method": "pipeline", "num_sm": 8},
        "fc2_fprop": {"method": "auto"},
        "fc1_fprop": {"method": "sequential"},
    }
    with make_manager(ub_cfgs=config, backend=backend) as manager:
        texts = {name: manager.explain(name, 7) for name in ("qkv_fprop", "qkv_dgrad", *config)}
        texts["too large"] = manager.explain("qkv_fprop", CAPACITY + 1)
        texts["no shape"] = manager.explain("qkv_fprop")
        manager.set_active_shape(partition=TokenPartition.from_counts((1, 6, 0)[:size]))
        texts["active shape"] = manager.explain("qkv_fprop")
        return texts


def fp8_explanations(rank: int, size: int) -> dict[str, str]:
    config = {
        "proj_fprop": {"method": "pipeline", "fp8_buf": True},
        "qkv_wgrad": {"method": "bulk"},
        "fc1_fprop": {"method": "fused"},
        "fc1_dgrad": {"method": "fused", "fp8_buf": True},
    }
    with make_manager(ub_cfgs=config, quantization_modes=["none", "fp8"]) as manager:
        names = ("qkv_fprop", "proj_fprop", "fc2_fprop", "qkv_wgrad", "fc1_fprop", "fc1_dgrad")
        return {name: manager.explain(name, 7) for name in names}


def counted(rank: int, size: int) -> dict[str, Any]:
    """T = 1, 3, 4, 24 of C = 24: buckets are eighths of C."""
    with make_manager() as manager:
        assert manager.stats() == {}
        for total in (1, 3, 4, CAPACITY):
            manager.set_active_shape(total)
            assert_right(manager, TokenPartition.balanced(total, size), "qkv", None, backward=total == 4)
        return manager.stats()


def staged(rank: int, size: int) -> list[int]:
    """What memory_report says about staging: of a name, its FP8 twin, a layer's view of it, an unregistered name."""
    with make_manager(quantization_modes=["none", "fp8"]) as manager:
        named = manager.get("proj_fprop")
        layer = named.with_config(replace(named.config, method="sequential"))
        makers = (named, manager.get("proj_fprop", quantised=True), layer, layer.as_quantised())
        held = []
        for communicator in (*makers, manager.layer("vision", row=True).fprop):
            communicator.get_buffer()
            held.append(manager.memory_report()["staging_bytes"])
        return held


def reported(rank: int, size: int, backend: str) -> dict[str, Any]:
    """memory_report beside memory_estimate, for an even and an uneven capacity."""
    reports = {}
    for name, options in {
        "float32": {},
        "bfloat16": {"dtype": torch.bfloat16, "capacity_shape": (1001, 96)},
        "all rows on one rank": {"max_rows_per_rank": CAPACITY},
    }.items():
        with make_manager(backend=backend, **options) as manager:
            estimate = tpo.memory_estimate(
                manager.capacity_shape,
                size,
                dtype=manager.dtype,
                max_rows_per_rank=options.get("max_rows_per_rank"),
            )
            before = manager.memory_report()
            manager.get("proj_fprop").copy_into_buffer(seeded(*manager.capacity_shape, seed=0, dtype=manager.dtype))
            reports[name] = {"report": before, "estimate": estimate, "after": manager.memory_report()}
    return reports
