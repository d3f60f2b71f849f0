"""What rank functions of these tests share: a small manager, seeded inputs, and a check that it computes right numbers."""

from __future__ import annotations

from typing import Any

import torch

import tpoverlap as tpo
from tpoverlap.tokens import TokenPartition

CAPACITY = 24
WIDTH = 16
FEATURES = 6
"""N of all-gather GEMMs, K of reduce-scatter GEMMs, on each rank."""

Outcome = tuple[list[str], str] | None
"""What a call raised: the names of its class and its bases, and its message. None: nothing."""


def make_manager(**options: Any) -> tpo.UserBufferManager:
    """Capacity (24, 16) in float32. A time-out well below the pool's, so that a wait in vain is an error, not a hang."""
    return tpo.UserBufferManager(
        None, options.pop("capacity_shape", (CAPACITY, WIDTH)), **({"dtype": torch.float32, "timeout_s": 20.0} | options)
    )


def seeded(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers that every rank can draw alike."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def outcome_of(call: Any) -> Outcome:
    """Run ``call``; what it raised."""
    try:
        call()
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return None


def assert_right(
    manager: tpo.UserBufferManager,
    partition: TokenPartition,
    column: Any = "qkv",
    row: Any = "proj",
    width: int = WIDTH,
    **options: Any,
) -> None:
    """AG + GEMM on ``column`` and GEMM + RS on ``row``, whole results against plain torch.

    ``column`` and ``row`` are layer names or communicators, None to leave one out; ``options`` (``partition=``) go
    to both functions.
    """
    rank, size, total = manager.rank, manager.tp_size, partition.total
    if column is not None:
        comm = manager.layer(column) if isinstance(column, str) else column
        x, weight = seeded(total, width, seed=total), seeded(FEATURES, width, seed=100 + rank)
        y = tpo.all_gather_gemm(x[partition.rows(rank)], weight, comm, **options)
        torch.testing.assert_close(y, x @ weight.t())
    if row is not None:
        comm = manager.layer(row, row=True) if isinstance(row, str) else row
        xs = [seeded(total, FEATURES, seed=200 + total + peer) for peer in range(size)]
        weights = [seeded(width, FEATURES, seed=300 + peer) for peer in range(size)]
        y_shard = tpo.gemm_reduce_scatter(xs[rank], weights[rank], comm, **options)
        expected = sum(a @ b.t() for a, b in zip(xs, weights, strict=True))
        assert isinstance(expected, torch.Tensor), "there is at least one rank"
        torch.testing.assert_close(y_shard, expected[partition.rows(rank)])
