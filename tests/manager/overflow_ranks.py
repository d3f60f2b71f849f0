"""Rank functions of `test_overflow`."""

from __future__ import annotations

from typing import Any

import torch

import tpoverlap as tpo
from tests.manager.ranks import CAPACITY, WIDTH, LogLines, Outcome, assert_right, make_manager, outcome_of, seeded
from tpoverlap.tokens import TokenPartition


def above_capacity(rank: int, size: int, backend: str) -> dict[str, Any]:
    """T below, above and below C again; then rows above max_rows_per_rank. Forward and backward, whole tensors."""
    with make_manager(on_overflow="sequential", backend=backend) as manager, LogLines() as log:
        allocations = manager.memory_report()["allocations"]
        for partition in (
            TokenPartition.balanced(7, size),
            TokenPartition.balanced(CAPACITY + 5, size),
            TokenPartition.balanced(CAPACITY, size),
            TokenPartition((0,) * (size - 1) + (CAPACITY,)),
        ):
            manager.set_active_shape(partition)
            assert manager.num_tokens == partition.total
            assert_right(manager, partition, backward=True)
        with manager.microbatch(CAPACITY + 1) as partition:
            assert_right(manager, partition)
        assert_right(manager, TokenPartition.balanced(CAPACITY + 2, size), by_call=True)
        manager.set_active_shape(CAPACITY + 3)
        assert_right(manager, TokenPartition.balanced(CAPACITY + 3, size), "fc1", None)
        assert manager.memory_report()["allocations"] == allocations
        return {
            "stats": manager.stats(),
            "lines": log.having("above the capacity"),
            "explain": manager.explain("qkv_fprop", CAPACITY + 5),
            "buffer": outcome_of(manager.get("qkv_fprop").get_buffer),
        }


def linear(rank: int, size: int) -> None:
    """nn.Linear column and row at T above C, with gradients."""
    total = CAPACITY + 1
    partition = TokenPartition.balanced(total, size)
    with make_manager(on_overflow="sequential") as manager:
        column = tpo.nn.Linear(WIDTH, 4 * size, parallel_mode="column", manager=manager, ub_name="fc1")
        row = tpo.nn.Linear(4 * size, WIDTH, parallel_mode="row", manager=manager, ub_name="fc2")
        x = seeded(total, WIDTH, seed=1)
        shard = x[partition.rows(rank)].requires_grad_()
        with manager.microbatch((total, WIDTH)):
            out = row(column(shard))
        out.square().sum().backward()
        weights: list[Any] = [None] * size
        torch.distributed.all_gather_object(weights, (column.weight.detach(), row.weight.detach()))
        whole = x.clone().requires_grad_()
        expected = whole @ torch.cat([w for w, _ in weights]).t() @ torch.cat([w for _, w in weights], 1).t()
        expected.square().sum().backward()
        torch.testing.assert_close(out, expected[partition.rows(rank)])
        assert whole.grad is not None
        torch.testing.assert_close(shard.grad, whole.grad[partition.rows(rank)])


def default_is_an_error(rank: int, size: int) -> list[Outcome]:
    """on_overflow left alone: every way to ask for T > C."""
    large = TokenPartition.balanced(CAPACITY + 1, size)
    with make_manager() as manager:
        x = torch.ones(large.counts[rank], WIDTH)
        outcomes = [
            outcome_of(lambda: manager.set_active_shape((CAPACITY + 1, WIDTH))),
            outcome_of(lambda: tpo.all_gather_gemm(x, torch.ones(4, WIDTH), manager.layer("qkv"), partition=large)),
            outcome_of(lambda: manager.get("proj_fprop").set_buffer_active_shape(large)),
        ]
        manager.set_active_shape(CAPACITY)
        assert_right(manager, TokenPartition.balanced(CAPACITY, size))
    return outcomes


def disagree(rank: int, size: int) -> Outcome:
    """One rank is above the capacity, the others are not: nobody hangs in a plain collective."""
    manager = make_manager(on_overflow="sequential")
    total = CAPACITY + 1 if rank == 0 else CAPACITY
    outcome = outcome_of(lambda: assert_right(manager, TokenPartition.balanced(total, size), None, "proj"))
    manager.close()
    return outcome
