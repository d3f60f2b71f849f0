"""Rank functions of `test_names`."""

from __future__ import annotations

from typing import Any

import torch

import tpoverlap as tpo
from tests.manager.ranks import CAPACITY, WIDTH, LogLines, assert_right, make_manager, outcome_of
from tpoverlap.tokens import TokenPartition


def register(rank: int, size: int, backend: str) -> dict[str, Any]:
    """Other widths and capacities: in the existing regions where they fit, else in a further arena; right numbers."""
    allocations = []
    with make_manager(backend=backend) as manager:
        before = manager.memory_report()

        def count() -> None:
            allocations.append(manager.memory_report()["allocations"] - before["allocations"])

        manager.register("narrow", width=8)
        count()
        manager.register("wide_but_short", width=4 * WIDTH, max_tokens=CAPACITY // 4)
        count()
        manager.register("wide", width=WIDTH + 1)
        count()
        manager.register("long", width=WIDTH, max_tokens=3 * CAPACITY)
        count()
        manager.register("one_sided", width=WIDTH, max_rows_per_rank=CAPACITY)
        count()
        manager.register("lm_head_fprop", width=8)
        count()
        total = {"narrow": 7, "wide_but_short": 6, "wide": CAPACITY, "long": 3 * CAPACITY, "lm_head": 7}
        for layer, num_tokens in total.items():
            width = manager.get(f"{layer}_fprop").width
            partition = TokenPartition.balanced(num_tokens, size)
            assert_right(manager, partition, layer, None, width, by_call=True, backward=True)
        for layer in ("narrow", "wide"):
            width = manager.get(f"{layer}_fprop").width
            assert_right(manager, TokenPartition.balanced(7, size), None, layer, width, by_call=True, backward=True)
        assert_right(
            manager, TokenPartition((CAPACITY,) + (0,) * (size - 1)), "one_sided", None, by_call=True, backward=True
        )
        # every rank: 25 tokens do not fit "narrow"
        large = TokenPartition.balanced(CAPACITY + 1, size)
        outcome = outcome_of(lambda: assert_right(manager, large, "narrow", None, 8, by_call=True))
        # one shape for a name: in its own width
        comm = manager.get("wide_fprop")
        comm.set_buffer_active_shape((5, WIDTH + 1))
        wrong_width = outcome_of(lambda: comm.set_buffer_active_shape((5, WIDTH)))
        assert_right(manager, TokenPartition.balanced(7, size), by_call=True)
        torch.distributed.barrier()
        return {
            "allocations": allocations,
            "regions": sorted(manager.memory_report()["regions"]),
            "capacity": outcome,
            "wrong width": wrong_width,
            "shapes": {name: manager.get(f"{name}_fprop").get_buffer_capacity_shape() for name in total},
            "stats": manager.stats(),
        }


def own_names(rank: int, size: int) -> dict[str, Any]:
    """Names with and without options: in column and in row use, by layer and by communicator."""
    config = {
        "mtp_fprop": {"method": "pipeline", "num_splits": 3},
        "gate_fprop": {"method": "ring_exchange", "is_reduce_scatter": False, "aggregate": True},
        "quiet_fprop": {"method": "sequential", "is_reduce_scatter": False},
    }
    with make_manager(ub_cfgs=config) as manager:
        for name in ("mtp", "gate", "quiet", "plain", "free_dgrad"):
            manager.register(name, width=3 * WIDTH)
        partition = TokenPartition.balanced(7, size)
        manager.set_active_shape(partition)
        for column, row in ((None, "mtp"), ("gate", None), ("quiet", None), ("plain", None)):
            assert_right(manager, partition, column, row, 3 * WIDTH, backward=True)
        # A communicator that is no layer's fprop: its own regions serve the backward pass too.
        free = manager.get("free_dgrad")
        assert_right(manager, partition, free, None, 3 * WIDTH, backward=True)
        return {
            "row of mtp": manager.layer("mtp").fprop.is_reduce_scatter,
            "row of plain": manager.layer("plain").fprop.is_reduce_scatter,
            "mtp as a column": outcome_of(lambda: manager.layer("mtp", row=False)),
            "gate as a row": outcome_of(lambda: manager.layer("gate", row=True)),
            "same object": manager.layer("gate") is manager.layer("gate", row=False),
            "stats": manager.stats(),
        }


def unregistered(rank: int, size: int) -> dict[str, Any]:
    """A name that nobody registered: right numbers in both uses and at any width, and nobody else is affected."""
    partition = TokenPartition.balanced(7, size)
    with make_manager() as manager, LogLines() as log:
        manager.set_active_shape(partition)
        for _ in range(2):
            assert_right(manager, partition, "vision", "vision", backward=True)
            assert_right(manager, partition, "qkv", "proj", backward=True)
        assert_right(manager, partition, "audio", "audio", width=5, backward=True)
        linear = tpo.nn.Linear(WIDTH, 2 * size, parallel_mode="column", manager=manager, ub_name="vision")
        linear(torch.ones(partition.counts[rank], WIDTH)).sum().backward()
        return {
            "lines": log.having("is not registered"),
            "stats": manager.stats(),
            "plan": manager.plan()["methods"],
            "get": outcome_of(lambda: manager.get("vision_fprop")),
        }


def mistyped(rank: int, size: int) -> dict[str, Any]:
    """Slips: a layer's name in `layer`, a GEMM's in `get`, one kind where the other is meant."""
    with make_manager() as manager, LogLines() as log:
        manager.register("mtp", width=WIDTH)
        for name in ("qvk", "Fc-2", "qkv_fprop", "mtp_proj", "vision"):
            manager.layer(name, row=False)
        return {
            "lines": log.having("is not registered"),
            "explain": {name: manager.explain(f"{name}_fprop", 7) for name in ("qvk", "vision")},
            "get": {
                name: outcome_of(lambda name=name: manager.get(name))  # type: ignore[misc]
                for name in ("qvk_fprop", "qkv_fporp", "mpt_dgrad", "qkv", "vision_fprop", "mtp_proj_fprop")
            },
        }


def used_both_ways(rank: int, size: int) -> dict[str, Any]:
    """One name of the user's own, as a column and as a row layer in turn: every call is counted."""
    partition = TokenPartition.balanced(7, size)
    with make_manager() as manager:
        manager.register("shared", width=WIDTH)
        manager.set_active_shape(partition)
        column, row = manager.layer("shared", row=False), manager.layer("shared", row=True)
        for _ in range(2):
            assert_right(manager, partition, column, row, backward=True)
        return manager.stats()


def from_file(rank: int, size: int, path: str) -> dict[str, Any]:
    """ub_cfgs from YAML."""
    partition = TokenPartition.balanced(7, size)
    with make_manager(ub_cfgs=path) as manager:
        manager.set_active_shape(partition)
        assert_right(manager, partition, "qkv", "proj", backward=True)
        assert_right(manager, partition, "mla_down", None, backward=True)
        return {"stats": manager.stats(), "explain": manager.explain("proj_fprop", 7)}


def classes(rank: int, size: int) -> dict[str, str]:
    config = {"proj_fprop": {"method": "pipeline"}, "fc2_fprop": {"method": "sequential"}}
    with make_manager(ub_cfgs=config) as manager:
        names = ("qkv_fprop", "qkv_dgrad", "qkv_wgrad", "proj_fprop", "proj_dgrad", "fc2_fprop")
        return {name: type(manager.get(name)).__name__ for name in names}
