"""Rank functions of `test_pieces`: few features, so that chunks of thousands of rows are small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import tpoverlap as tpo
from tests.comm.operations import integers, require_equal
from tpoverlap import pieces
from tpoverlap.testing import faults
from tpoverlap.tokens import TokenPartition

CAPACITY, WIDTH, OUT = 9000, 8, 6
ROWS = 1074


@contextmanager
def cut_from(rows: int, narrow_operand_bytes: int = 0) -> Iterator[None]:
    """Chunks of that many rows are cut in two though they are narrow, longer ones in four if so are their operands."""
    with (
        patch.object(pieces, "FULL_PIECE", rows * WIDTH // 2),
        patch.object(pieces, "NARROW_OPERAND_BYTES", narrow_operand_bytes),
        patch.object(pieces, "_COUNTED_FROM", 0),
    ):
        yield


def _manager(backend: Any, dtype: torch.dtype = torch.float32) -> tpo.UserBufferManager:
    config = {
        "proj_fprop": {"method": "ring_exchange"},
        "fc2_fprop": {"method": "sequential"},
        "qkv_dgrad": {"method": "ring_exchange", "is_reduce_scatter": True},
        "qkv_wgrad": None,
    }
    return tpo.UserBufferManager(
        dist.group.WORLD,
        (CAPACITY, WIDTH),
        dtype,
        "cpu",
        {name: options for name, options in config.items() if options is not None},
        backend=backend,
        timeout_s=30.0,
        max_rows_per_rank=CAPACITY // 2,
    )


PROCESSORS = 4
"""So few that narrow results have several waves."""
BY_COST: list[tuple[list[int], pieces.Cut]] = [
    *(([3400, 3400], pieces.FirstPiece(1920)), ([3072, 3072], 1536), ([3401, 3400], pieces.FirstPiece(1920))),
    *(([3300, 3407], pieces.FirstPiece(1920)), ([2560, 3400], 1700), ([3200, 3200], pieces.FirstPiece(1920))),
]
"""Rows of both ranks, and how chunks are cut for so few."""


def compared(rank: int, size: int, backend: Any, delay: str, processors: int) -> dict[str, set[int]]:
    """All-gather and reduce-scatter against plain torch; how many pieces this rank sent."""
    seen: dict[str, set[int]] = {"gather": set(), "scatter": set()}
    counts = [[40, 41], [1024, 1024], [3000, 2049], [1023, 4000], [2048, 2500], [1, 0], [4500, 4500], [1100, 1030]]
    if processors:
        counts = [rows for rows, _ in BY_COST]
    with cut_from(1024, 0 if processors else 4 * OUT + 1), _manager(backend) as mgr:
        mgr.channel.multiprocessors = processors  # type: ignore[union-attr]
        disturbed: Any = nullcontext()
        if delay == "transfers":
            disturbed = faults.delay_transfers(mgr, 0.005, only_source=1)
        elif delay == "gemms":
            disturbed = faults.delay_gemms(mgr, 0.005, only_rank=0)
        with disturbed:
            for seed, each in enumerate(counts):
                partition = TokenPartition.from_counts(each)
                rows = partition.rows(rank)
                x, w = integers(seed, partition.total, WIDTH), integers(seed + rank, OUT, WIDTH)
                with faults.tracing(mgr) as trace:
                    y = tpo.all_gather_gemm(x[rows], w, mgr.layer("qkv"), partition=partition)
                seen["gather"].add(sum(mark.what == "sent" for mark in trace.marks()))
                require_equal(y, x @ w.t(), f"gather {each}")
                inner = [integers(seed + 5 * r, partition.total, OUT) for r in range(size)]
                back = [integers(seed + 7 * r, WIDTH, OUT) for r in range(size)]
                bias = integers(seed, WIDTH) if seed % 2 else None
                with faults.tracing(mgr) as trace:
                    z = tpo.gemm_reduce_scatter(inner[rank], back[rank], mgr.layer("proj"), bias, partition)
                seen["scatter"].add(sum(mark.what == "sent" for mark in trace.marks()))
                wanted = sum(i @ b.t() for i, b in zip(inner, back, strict=True))[rows]  # type: ignore[index]
                require_equal(z, wanted if bias is None else wanted + bias, f"scatter {each}")
        mgr.check()
    return {name: counts - {0} for name, counts in seen.items()}


def one_by_cost(rank: int, size: int, where: int) -> str:
    """Only rank ``where`` knows multiprocessors, so it alone cuts where GEMMs are cheapest."""
    with cut_from(1024), _manager("shared") as mgr:
        mgr.channel.multiprocessors = PROCESSORS if rank == where else 0  # type: ignore[union-attr]
        partition = TokenPartition.from_counts(BY_COST[0][0])
        try:
            tpo.gemm_reduce_scatter(
                integers(1, partition.total, OUT), integers(2, WIDTH, OUT), mgr.layer("proj"), partition=partition
            )
        except tpo.TpOverlapError as error:
            return type(error).__name__
    return "no error"


def rounding(rank: int, size: int, count: int, processors: int) -> tuple[float, float]:
    """Mean error against float64 of the sum in pieces, and of the sequential twin."""
    generator = torch.Generator().manual_seed(3)
    x = [torch.randn(2 * count, OUT, generator=generator).bfloat16() for _ in range(size)]
    w = [torch.randn(WIDTH, OUT, generator=generator).bfloat16() for _ in range(size)]
    exact = sum(a.double() @ b.double().t() for a, b in zip(x, w, strict=True))
    with cut_from(ROWS), _manager("shared", torch.bfloat16) as mgr:
        mgr.channel.multiprocessors = processors  # type: ignore[union-attr]
        partition = TokenPartition.even(2 * count, 2)
        errors = []
        for name in ("proj", "fc2"):
            y = tpo.gemm_reduce_scatter(x[rank], w[rank], mgr.layer(name), partition=partition)
            errors.append(float((y.double() - exact[partition.rows(rank)]).abs().mean()))  # type: ignore[index]
    return errors[0], errors[1]


def two_weights(rank: int, size: int) -> bool:
    """dx of two weights that shared a gather, with the scatter inside dgrad."""
    partition = TokenPartition.even(2 * ROWS, 2)
    x = integers(1, 2 * ROWS, WIDTH)
    weights = [[integers(10 * r + i, OUT, WIDTH) for i in range(2)] for r in range(size)]
    grads = [[integers(20 * r + i, 2 * ROWS, OUT) for i in range(2)] for r in range(size)]
    with cut_from(ROWS), _manager("shared") as mgr:
        shard = x[partition.rows(rank)].clone().requires_grad_()
        outs = tpo.all_gather_gemm(shard, weights[rank], mgr.layer("qkv"), partition=partition)
        torch.autograd.backward(outs, grads[rank])
        wanted = sum(g @ w for r in range(size) for g, w in zip(grads[r], weights[r], strict=True))
        require_equal(shard.grad, wanted[partition.rows(rank)], "dx")  # type: ignore[index]
    return True


def cut_differently(rank: int, size: int) -> str:
    """One rank's features are few enough for pieces, the other one's are not."""
    partition, features = TokenPartition.even(4 * ROWS, 2), (OUT, 3 * OUT)[rank]
    with cut_from(ROWS, 4 * OUT + 1), _manager("shared") as mgr:
        try:
            tpo.gemm_reduce_scatter(
                integers(1, 4 * ROWS, features), integers(2, WIDTH, features), mgr.layer("proj"), partition=partition
            )
        except tpo.TpOverlapError as error:
            return type(error).__name__
    return "no error"
