"""Rank functions of `test_fp8_dispatch`: what runs under a recipe and beside it, with the same bits by every method."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import tpoverlap as tpo
from tests.manager.ranks import seeded
from tests.tuning.dispatch_ranks import ran
from tpoverlap.method_tables import machine_of
from tpoverlap.plan import plan_hash
from tpoverlap.tokens import TokenPartition
from tpoverlap.tuning import Candidate, Evidence, Problem, Row, entry_key, load_device, write_entries
from tpoverlap.tuning.device import Rate

CAPACITY, WIDTH, FEATURES = 24, 32, 48
Results = tuple[torch.Tensor, ...]


def _entry(**rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"features": FEATURES, "width": WIDTH, **rows}


SMALL_THEN_RING = [{"up_to": 8, "method": "sequential"}, {"up_to": CAPACITY, "method": "ring_exchange"}]
SECTION = {
    "qkv_fprop": _entry(rows=[{"up_to": CAPACITY, "method": "ring_exchange"}], fp8_rows=SMALL_THEN_RING),
    "proj_fprop": _entry(fp8_rows=[{"up_to": 8, "method": "pipeline", "num_splits": 4}, *SMALL_THEN_RING[1:]]),
    "proj_dgrad": _entry(fp8_rows=SMALL_THEN_RING),
    "qkv_dgrad": _entry(rows=[{"up_to": CAPACITY, "method": "sequential"}]),
    "qkv_wgrad": _entry(fp8_rows=[{"up_to": CAPACITY, "method": "sequential"}]),
}


def make_manager(**options: Any) -> tpo.UserBufferManager:
    fixed = {"dtype": torch.float32, "timeout_s": 20.0, "quantization_modes": ["none", "fp8"]}
    return tpo.UserBufferManager(None, (CAPACITY, WIDTH), **(fixed | options))


def layers(manager: Any, tokens: int, *, fp8: bool) -> Callable[[], Results]:
    """A column and a row layer forward and backward; gives both outputs and all gradients."""
    rank, partition = manager.rank, TokenPartition.balanced(tokens, manager.tp_size)
    recipe = tpo.Float8CurrentScaling()

    def run() -> Results:
        x = seeded(tokens, WIDTH, seed=1)[partition.rows(rank)].requires_grad_()
        first, second = (
            seeded(*shape, seed=2 + rank).requires_grad_() for shape in ((FEATURES, WIDTH), (WIDTH, FEATURES))
        )
        states = [tpo.Fp8State(recipe) if fp8 else None for _ in range(2)]
        with manager.microbatch(tokens):
            y = tpo.all_gather_gemm(x, first, manager.layer("qkv"), fp8=states[0])
            z = tpo.gemm_reduce_scatter(y, second, manager.layer("proj"), fp8=states[1])
            z.sum().backward()
        assert x.grad is not None and first.grad is not None and second.grad is not None
        return y.detach(), z.detach(), x.grad, first.grad, second.grad

    return run


def _both(manager: Any, tokens: int, *, fp8: bool = True) -> tuple[dict[str, str], Results]:
    results: list[Results] = []
    methods = ran(manager, lambda: results.append(layers(manager, tokens, fp8=fp8)()))
    return methods, results[0]


def by_section(rank: int, size: int) -> dict[str, Any]:
    """Rows for FP8 are another table than those beside them; a pinned plan has both; every method the same bits."""
    found: dict[str, Any] = {}
    with make_manager(ub_cfgs={"tpoverlap": {"by_tokens": SECTION}}) as manager:
        found["small"], small = _both(manager, 6)
        found["large"], large = _both(manager, 20)
        found["wide"] = _both(manager, 6, fp8=False)[0]
        found["explain"] = manager.explain("qkv_fprop", 6)
        found["labels"] = set(manager._tables.possible_labels([manager.get("proj_fprop")], fp8=True))
        plan = manager.plan()
    with make_manager(plan=json.loads(json.dumps(plan))) as manager:
        found["pinned"], again = _both(manager, 6)
    with make_manager(
        ub_cfgs={"qkv_fprop": {"method": "ring_exchange"}, "tpoverlap": {"by_tokens": SECTION}}
    ) as manager:
        found["written"], written = _both(manager, 6)
    with make_manager() as manager:
        found["nothing known"], default = _both(manager, 6)
        default_large = _both(manager, 20)[1]
    for ours, theirs in ((small, default), (again, default), (written, default), (large, default_large)):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    return found


def by_cache(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Rank 0's entry of FP8 serves every rank, and FP8 alone."""
    problem = Problem("gather", 1, WIDTH, FEATURES, size, 4, fp8=True)
    mine = Path(folder) / f"rank{rank}"
    if rank == 0:
        rows = [Row(CAPACITY, Candidate("sequential"), 1.0, 1.0, 2.0)]
        write_entries(mine, machine_of(torch.device("cpu"), "shared"), {entry_key(problem): rows})
    with make_manager(tuning_cache=mine) as manager:
        return {"fp8": _both(manager, 6)[0], "wide": _both(manager, 6, fp8=False)[0]}


def by_model(rank: int, size: int) -> dict[str, Any]:
    """A plan's device: copies as slow as its GEMMs, but FP8 GEMMs whose launch takes a second; and one without FP8."""
    with make_manager() as manager:
        plan = manager.plan()
    h200 = replace(load_device("h200"), host_us={})
    assert h200.fp8 is not None
    gemm = replace(h200.gemm, launch_us=0.0, tile_us_per_k=0.0, tile_fixed_us=0.0)
    slow = replace(h200, gemm=gemm, memory_gb_s=1e-3, copy=Rate(0.0, 2e-5), trade=None)
    devices = {
        "slow launches in FP8": replace(slow, fp8=replace(h200.fp8, gemm=replace(gemm, launch_us=1e6))),
        "no FP8": replace(h200, gemm=replace(h200.gemm, launch_us=1e6), fp8=None),
    }
    results: dict[str, Any] = {}
    for label, device in devices.items():
        content = plan | {"by_tokens": Evidence(device=device).to_dict()}
        content["methods"] = {name: row | {"method": "auto"} for name, row in plan["methods"].items()}
        with make_manager(plan=content | {"hash": plan_hash(content)}) as manager:
            results[label] = _both(manager, 20)[0]
            results[f"{label} explain"] = manager.explain("qkv_fprop", 20)
            results[f"{label} wide"] = _both(manager, 20, fp8=False)[0]
    return results
