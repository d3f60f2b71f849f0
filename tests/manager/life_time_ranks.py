"""Rank functions of `test_life_time`."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import psutil
import torch

import tpoverlap as tpo
from tests.manager.ranks import CAPACITY, FEATURES, WIDTH, Outcome, assert_right, make_manager, outcome_of, seeded
from tpoverlap.tokens import TokenPartition

HARMLESS = ("close", "abort", "has_fixed_direction", "require_input")
"""Public methods that may be called after the end: the end itself, and look-ups that the package uses."""


def after_the_end(rank: int, size: int, how: str) -> dict[str, Outcome]:
    """Every public method of a manager that was closed, aborted or left by an exception, and of what it gave out."""
    manager = make_manager()
    partition = TokenPartition.balanced(7, size)
    manager.set_active_shape(partition)
    layer, gather, scatter = manager.layer("qkv"), manager.get("qkv_fprop"), manager.get("proj_fprop")
    linear = tpo.nn.Linear(WIDTH, 2 * size, parallel_mode="column", manager=manager, ub_name="qkv")
    shard = seeded(7, WIDTH, seed=0)[partition.rows(rank)].requires_grad_()
    weight = seeded(FEATURES, WIDTH, seed=1)
    y = tpo.all_gather_gemm(shard, weight, layer)
    if how == "close":
        manager.close()
    elif how == "abort":
        torch.distributed.barrier()  # all ranks are through; else a peer may rightly report the abort
        manager.abort()
    else:
        torch.distributed.barrier()
        assert outcome_of(lambda: _fail_inside(manager)) is not None
    manager.close()
    manager.abort()  # both idempotent, in any order

    def enter(context: Any) -> None:
        with context:
            pass

    calls = {
        "set_active_shape": lambda: manager.set_active_shape(5),
        "microbatch": lambda: enter(manager.microbatch(5)),
        "get": lambda: manager.get("qkv_fprop"),
        "layer": lambda: manager.layer("qkv"),
        "register": lambda: manager.register("vision", width=8),
        "explain": lambda: manager.explain("qkv_fprop", 5),
        "plan": manager.plan,
        "stats": manager.stats,
        "memory_report": manager.memory_report,
        "check": manager.check,
        "operation": lambda: manager.operation(gather, partition, scatter=False),
        "next_gather_slot": lambda: manager.next_gather_slot(gather, partition),
        "require_open": manager.require_open,
        "with": lambda: enter(manager),
        "communicator.set_buffer_active_shape": lambda: gather.set_buffer_active_shape((5, WIDTH)),
        "communicator.get_buffer": gather.get_buffer,
        "communicator.get_buffer of a scatter": scatter.get_buffer,
        "communicator.copy_into_buffer": lambda: scatter.copy_into_buffer(torch.ones(7, WIDTH)),
        "all_gather_gemm": lambda: tpo.all_gather_gemm(shard, weight, layer),
        "all_gather_gemm by communicator": lambda: tpo.all_gather_gemm(shard, weight, gather),
        "gemm_reduce_scatter": lambda: tpo.gemm_reduce_scatter(y.detach(), weight.t().contiguous(), scatter),
        "bulk_all_gather": lambda: tpo.bulk_all_gather(shard, gather, (weight, weight)),
        "bulk_reduce_scatter": lambda: tpo.bulk_reduce_scatter(torch.ones(7, WIDTH), scatter, (weight, weight)),
        "Linear.forward": lambda: linear(shard),
        "backward": lambda: y.sum().backward(),
    }
    methods = {
        name for name in dir(manager) if not name.startswith("_") and callable(getattr(type(manager), name, None))
    }
    assert methods - set(HARMLESS) <= set(calls), f"not tried: {methods - set(HARMLESS) - set(calls)}"
    return {name: outcome_of(call) for name, call in calls.items()}


def _fail_inside(manager: tpo.UserBufferManager) -> None:
    with manager:
        raise KeyError("the user's own")


def an_exception_is_kept(rank: int, size: int) -> list[Outcome]:
    """An exception inside ``with`` on one rank: it comes out there; the others hear of it at their next operation."""

    def work() -> None:
        with make_manager() as manager:
            manager.set_active_shape(7)
            if rank == 0:
                raise KeyError("the user's own")
            assert_right(manager, TokenPartition.balanced(7, size))

    return [outcome_of(work)]


def again_and_again(rank: int, size: int) -> None:
    """initialise, close, initialise with another shape, dtype, backend, group; two managers at a time."""
    partition = TokenPartition.balanced(7, size)
    for options in (
        {},
        {"capacity_shape": (40, WIDTH), "backend": "process_group"},
        {"capacity_shape": (7, WIDTH), "ub_cfgs": {"proj_fprop": {"method": "pipeline", "num_splits": 2}}},
    ):
        with make_manager(**options) as manager, make_manager() as other:
            for each in (manager, other, manager):
                each.set_active_shape(7)
                assert_right(each, partition)
    with make_manager(dtype=torch.bfloat16) as manager:
        manager.set_active_shape(CAPACITY)
        own = TokenPartition.balanced(CAPACITY, size).rows(rank)
        x = seeded(CAPACITY, WIDTH, seed=0, dtype=torch.bfloat16)
        y = tpo.all_gather_gemm(x[own], torch.eye(WIDTH, dtype=torch.bfloat16), manager.layer("fc1"))
        torch.testing.assert_close(y, x, rtol=0, atol=0)
    outer = [0, size - 1]  # a subgroup whose ranks are not neighbours
    group = torch.distributed.new_group(outer)
    if rank in outer:
        with tpo.UserBufferManager(group, (CAPACITY, WIDTH), torch.float32, timeout_s=20.0) as manager:
            assert (manager.rank, manager.tp_size) == (outer.index(rank), 2)
            manager.set_active_shape(7)
            assert_right(manager, TokenPartition.balanced(7, 2))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group(group) if rank in outer else None


def alone(rank: int, size: int) -> dict[str, Any]:
    """R = 1 inside a larger world: everything works and nothing is communicated."""
    groups = [torch.distributed.new_group([peer]) for peer in range(size)]
    with tpo.UserBufferManager(groups[rank], (CAPACITY, WIDTH), torch.float32) as manager:
        with manager.microbatch(7):
            assert_right(manager, TokenPartition.balanced(7, 1))
            view = outcome_of(lambda: manager.get("qkv_fprop").get_buffer())
        manager.register("vision", width=8)
        assert_right(manager, TokenPartition.balanced(5, 1), manager.layer("vision"), None, width=8)
        return {
            "view": view,
            "explain": manager.explain("proj_fprop", 5),
            "report": manager.memory_report(),
            "stats": manager.stats(),
            "partition": manager.partition,
        }


def closes_after_an_error(rank: int, size: int, how: str) -> list[Outcome]:
    """Rank 0 raises before its operation, for which the others wait, and closes: what comes out of `close`."""
    manager = make_manager()
    closing: list[Outcome] = []

    def step() -> None:
        if how == "shape" and rank == 0:
            manager.set_active_shape(CAPACITY + 1)
        elif how == "normed layer":
            layer = tpo.nn.LayerNormLinear(WIDTH, 2 * size, manager=manager, ub_name="qkv")
            layer(torch.zeros(3, WIDTH if rank else WIDTH + 1))
        elif how == "cu_seqlens":
            layer = tpo.nn.MultiheadAttention(WIDTH, size, kv_channels=4, manager=manager)
            layer(torch.zeros(3, WIDTH), [0, 3 * size if rank else 99])
        elif how == "scatter":
            x = torch.zeros(3 * size, 4)
            tpo.gemm_reduce_scatter(x, torch.zeros(WIDTH, 4 if rank else 5), manager.layer("proj"))
        elif how == "bulk gather":
            x, operand = torch.zeros(3, WIDTH), torch.zeros(2, 4)
            tpo.bulk_all_gather(x, manager.get("qkv_dgrad"), (operand, operand if rank else operand.t()))
        elif how == "bulk scatter":
            y, operand = torch.zeros(3 * size, WIDTH if rank else 5), torch.zeros(2, 4)
            tpo.bulk_reduce_scatter(y, manager.get("qkv_wgrad"), (operand, operand))
        elif how == "user" and rank == 0:
            raise KeyError("the user's own")
        else:
            x = torch.zeros(3, WIDTH if rank or how == "again" else WIDTH + 1)
            tpo.all_gather_gemm(x, torch.zeros(FEATURES, WIDTH), manager.layer("qkv"))

    if how == "again":
        assert outcome_of(lambda: manager.set_active_shape(CAPACITY + 1)) is not None
        step()  # what was overcome is not named
    try:
        if how != "again" or rank:
            step()
    except Exception:
        if how in ("user", "finally"):
            closing.append(outcome_of(manager.close))
    return [*closing, outcome_of(manager.close)]


class _Marker:
    """Something of the caller's, to see whether its frame was let go."""


def what_an_error_keeps(rank: int, size: int, how: str, method: str) -> dict[str, Any]:
    """A disagreement with a graph behind it, caught and kept, then the end ``how``: what is still there, and why."""
    before = _mappings()
    manager = make_manager(ub_cfgs={"proj_fprop": {"method": method, "num_splits": 2, "num_sm": 1}})
    partition = TokenPartition.balanced(7, size)
    shard = seeded(7, WIDTH, seed=0)[partition.rows(rank)].requires_grad_()
    column, row = seeded(FEATURES, WIDTH, seed=1).requires_grad_(), seeded(WIDTH, FEATURES, seed=2)

    def step() -> weakref.ref[_Marker]:
        marker = _Marker()
        seen.append(weakref.ref(marker))
        y = tpo.all_gather_gemm(shard, column, manager.layer("qkv"), partition=partition)
        other = TokenPartition.from_counts([1] * size) if rank == 0 else partition
        tpo.gemm_reduce_scatter(y[: other.total], row, manager.layer("proj"), partition=other)
        return seen[0]

    seen: list[weakref.ref[_Marker]] = []
    error: Exception | None = None
    try:
        step()
    except tpo.TpOverlapError as caught:
        error = caught
    open_mappings = len(_mappings() - before)
    getattr(manager, how)()
    found = {"error": type(error).__name__, "open": open_mappings, "kept": len(_mappings() - before)}
    error = None
    gc.collect()  # tracebacks are cycles: that much is Python's own
    return found | {"frame": seen[0]() is not None}


def _mappings() -> set[str]:
    return {each.path for each in psutil.Process().memory_maps(grouped=False) if "tpoverlap-" in each.path}
