"""Rank functions of the cost tests: tiny GEMMs, so that what is measured is the host's work."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch

import tpoverlap as tpo
from tests.manager.ranks import FEATURES, WIDTH, make_manager, seeded
from tpoverlap.tokens import TokenPartition

CAPACITY = 1200


def set_shape_cost(rank: int, size: int, turns: int) -> dict[str, float]:
    """Median us of `set_active_shape` and of a scope, with T that was never seen before, and of the empty loop."""
    order = random.Random(0).sample(range(1, turns + 1), turns)
    with make_manager(capacity_shape=(turns, WIDTH)) as manager:

        def scope(num_tokens: int) -> None:
            with manager.microbatch(num_tokens):
                pass

        calls: dict[str, Callable[[int], object]] = {
            "empty": lambda num_tokens: None,
            "set": lambda num_tokens: manager.set_active_shape((num_tokens, WIDTH)),
            "scope": scope,
            "set for one name": lambda num_tokens: manager.get("qkv_fprop").set_buffer_active_shape(num_tokens),
            "set counts": lambda num_tokens: manager.set_active_shape(
                partition=TokenPartition.from_counts(
                    [num_tokens // size + (r < num_tokens % size) for r in range(size)]
                )
            ),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for num_tokens in order:
            for name, call in calls.items():
                started = time.perf_counter()
                call(num_tokens)
                times[name].append(1e6 * (time.perf_counter() - started))
        return {name: statistics.median(each) for name, each in times.items()}


def first_operation(rank: int, size: int, method: str, pairs: int) -> dict[str, list[float]]:
    """us of a new T's shape and first operation, and of the same T and operation again, in turn.

    Both calls of a pair set the shape, so that they differ by nothing but whether this T has been seen; the two are
    neighbours in time, so a busy machine slows both alike. What the manager keeps of a T is forgotten before the second
    call: what that saves (`tpoverlap.operation_cache`) would count as a cost of the first one.
    """
    tokens = random.Random(1).sample(range(1, CAPACITY + 1), pairs)
    weight = seeded(FEATURES, WIDTH, seed=1)
    times: dict[str, list[float]] = {"first": [], "repeated": []}
    with make_manager(capacity_shape=(CAPACITY, WIDTH), ub_cfgs={"qkv_fprop": {"method": method}}) as manager:
        layer = manager.layer("qkv")
        whole = seeded(CAPACITY, WIDTH, seed=0)
        for num_tokens in [3, 5, 3, 5, *tokens]:
            shard = whole[: num_tokens // size + (rank < num_tokens % size)]
            for which in ("first", "repeated"):
                torch.distributed.barrier()
                layer.fprop.operations.clear()
                started = time.perf_counter()
                manager.set_active_shape((num_tokens, WIDTH))
                tpo.all_gather_gemm(shard, weight, layer)
                times[which].append(1e6 * (time.perf_counter() - started))
    return {which: each[4:] for which, each in times.items()}
