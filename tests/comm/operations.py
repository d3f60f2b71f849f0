"""Every method as one call with its expected result. Integers in float32: any order of additions is exact, so results
are compared bit by bit, and a row that is stale, missing or of another rank cannot hide in a tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import tpoverlap as tpo
from tpoverlap.tokens import TokenPartition

CAPACITY, WIDTH, OUT = 60, 12, 20
"""C; H, which is communicated; features that stay local."""

CONFIG: dict[str, Any] = {
    "qkv_fprop": {"method": "ring_exchange"},
    "fc1_fprop": {"method": "ring_exchange", "aggregate": True},
    "proj_fprop": {"method": "pipeline", "num_splits": 3, "num_max_streams": 2},
    "fc2_fprop": {"method": "ring_exchange"},
    "plain_ag_fprop": {"method": "sequential", "is_reduce_scatter": False},
    "plain_rs_fprop": {"method": "sequential", "is_reduce_scatter": True},
}
GATHERS = {"ring_ag": "qkv", "aggregate_ag": "fc1", "sequential_ag": "plain_ag"}
SCATTERS = {"pipeline_rs": "proj", "ring_rs": "fc2", "sequential_rs": "plain_rs"}
KINDS = (*GATHERS, *SCATTERS, "bulk_ag", "bulk_rs")


def make_manager(backend: str, timeout_s: float = 30.0, **options: Any) -> tpo.UserBufferManager:
    """A manager with every method, whose ranks may own any number of rows."""
    options = {"max_rows_per_rank": CAPACITY, "ub_cfgs": CONFIG, "dtype": torch.float32} | options
    return tpo.UserBufferManager(
        dist.group.WORLD,
        (CAPACITY, WIDTH),
        device="cpu",
        backend=backend,
        timeout_s=timeout_s,
        **options,
    )


def integers(seed: int, *shape: int) -> torch.Tensor:
    """Small integers that every process can compute for itself."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float()


def run(mgr: tpo.UserBufferManager, kind: str, partition: TokenPartition, seed: int) -> Any:
    """Do one operation; returns what it gave."""
    rows = partition.rows(mgr.rank)
    if kind in GATHERS:
        x_shard_t, weight = _x(partition, seed)[rows], _w(mgr.rank, seed, OUT)
        return tpo.all_gather_gemm(x_shard_t, weight, mgr.layer(GATHERS[kind]), partition=partition)
    if kind in SCATTERS:
        x, weight = _inner(mgr.rank, partition, seed), _w2(mgr.rank, seed)
        return tpo.gemm_reduce_scatter(x, weight, mgr.layer(SCATTERS[kind], row=True), partition=partition)
    a, b = _beside(mgr.rank, seed)
    if kind == "bulk_ag":
        return tpo.bulk_all_gather(_x(partition, seed)[rows], mgr.get("qkv_dgrad"), gemm=(a, b), partition=partition)
    assert kind == "bulk_rs", kind
    y = integers(seed + 17 * mgr.rank, partition.total, WIDTH)
    return tpo.bulk_reduce_scatter(y, mgr.get("qkv_wgrad"), gemm=(a, b), partition=partition)


def expected(mgr: tpo.UserBufferManager, kind: str, partition: TokenPartition, seed: int) -> Any:
    """What `run` must give, computed here alone."""
    rows, ranks = partition.rows(mgr.rank), range(mgr.tp_size)
    if kind in GATHERS:
        return _x(partition, seed) @ _w(mgr.rank, seed, OUT).t()
    if kind in SCATTERS:
        return sum(_inner(r, partition, seed) @ _w2(r, seed).t() for r in ranks)[rows]  # type: ignore[index]
    a, b = _beside(mgr.rank, seed)
    if kind == "bulk_ag":
        return _x(partition, seed), a @ b.t()
    return sum(integers(seed + 17 * r, partition.total, WIDTH) for r in ranks)[rows], a @ b.t()  # type: ignore[index]


def run_checked(mgr: tpo.UserBufferManager, kind: str, partition: TokenPartition, seed: int) -> None:
    """`run`, and compare with `expected`.

    Raises:
        AssertionError: the result is wrong.
    """
    require_equal(run(mgr, kind, partition, seed), expected(mgr, kind, partition, seed), f"{kind} T={partition.total}")


def require_equal(actual: Any, wanted: Any, what: str) -> None:
    if isinstance(wanted, Sequence):
        assert len(actual) == len(wanted), what
        for number, (one, other) in enumerate(zip(actual, wanted, strict=True)):
            require_equal(one, other, f"{what}, result {number}")
        return
    assert actual.shape == wanted.shape, f"{what}: {list(actual.shape)} instead of {list(wanted.shape)}"
    wrong = int((actual != wanted).sum())
    assert wrong == 0, f"{what}: {wrong} of {wanted.numel()} elements are wrong"


def partitions(tp_size: int, count: int, seed: int = 0) -> list[TokenPartition]:
    """Balanced, uneven, with empty ranks, at capacity and of one row, in an order that grows and shrinks."""
    generator = torch.Generator().manual_seed(seed)
    fixed = [[1] + [0] * (tp_size - 1), [0] * (tp_size - 1) + [1], [0] * (tp_size - 1) + [CAPACITY]]
    result = [TokenPartition.balanced(CAPACITY, tp_size), *(TokenPartition.from_counts(counts) for counts in fixed)]
    while len(result) < count:
        cuts = torch.randint(0, CAPACITY // tp_size + 1, (tp_size,), generator=generator).tolist()
        if sum(cuts):
            result.append(TokenPartition.from_counts(cuts))
    order = torch.randperm(len(result), generator=generator).tolist()
    return [result[index] for index in order][:count]


def _x(partition: TokenPartition, seed: int) -> torch.Tensor:
    return integers(seed, partition.total, WIDTH)


def _w(rank: int, seed: int, out_features: int) -> torch.Tensor:
    return integers(seed + 31 * rank + 1, out_features, WIDTH)


def _inner(rank: int, partition: TokenPartition, seed: int) -> torch.Tensor:
    return integers(seed + 37 * rank + 2, partition.total, OUT)


def _w2(rank: int, seed: int) -> torch.Tensor:
    return integers(seed + 41 * rank + 3, WIDTH, OUT)


def _beside(rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return integers(seed + 43 * rank + 4, 7, 5), integers(seed + 47 * rank + 5, 6, 5)
