"""What rank functions of these tests share: a small manager, seeded inputs, and a check of its numbers."""

from __future__ import annotations

import logging
from typing import Any

import torch

import tpoverlap as tpo
from tpoverlap import errors
from tpoverlap.tokens import TokenPartition

CAPACITY = 24
WIDTH = 16
FEATURES = 6
"""N of all-gather GEMMs, K of reduce-scatter GEMMs, on each rank."""

Outcome = tuple[list[str], str] | None
"""What a call raised: the names of its class and its bases, and its message. None: nothing."""


def make_manager(**options: Any) -> tpo.UserBufferManager:
    """Capacity (24, 16) in float32. The time-out is well below the pool's: a wait in vain is an error, not a hang."""
    return tpo.UserBufferManager(
        None,
        options.pop("capacity_shape", (CAPACITY, WIDTH)),
        **({"dtype": torch.float32, "timeout_s": 20.0} | options),
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


def public_class(classes: list[str]) -> str:
    """The most special of these classes (most special first) that is in tpoverlap.errors."""
    return next((name for name in classes if hasattr(errors, name)), classes[0])


def assert_right(
    manager: tpo.UserBufferManager,
    partition: TokenPartition,
    column: Any = "qkv",
    row: Any = "proj",
    width: int = WIDTH,
    *,
    backward: bool = False,
    by_call: bool = False,
) -> None:
    """AG + GEMM on ``column`` and GEMM + RS on ``row``, whole results against plain torch.

    ``column`` and ``row`` are layer names or communicators, None to leave one out; ``backward`` compares the gradients
    too; ``by_call`` passes ``partition`` to the functions, else the active shape has to say it.
    """
    options = {"partition": partition} if by_call else {}
    if column is not None:
        comm = manager.layer(column, row=False) if isinstance(column, str) else column
        _assert_column(manager, partition, comm, width, backward, options)
    if row is not None:
        comm = manager.layer(row, row=True) if isinstance(row, str) else row
        _assert_row(manager, partition, comm, width, backward, options)


def _assert_column(
    manager: tpo.UserBufferManager, partition: TokenPartition, comm: Any, width: int, backward: bool, options: Any
) -> None:
    rank, size, total = manager.rank, manager.tp_size, partition.total
    own = partition.rows(rank)
    x = seeded(total, width, seed=total)
    weights = [seeded(FEATURES, width, seed=100 + peer) for peer in range(size)]
    shard, weight = x[own].requires_grad_(backward), weights[rank].clone().requires_grad_(backward)
    y = tpo.all_gather_gemm(shard, weight, comm, **options)
    torch.testing.assert_close(y, x @ weights[rank].t())
    if backward:
        grads = [seeded(total, FEATURES, seed=400 + peer) for peer in range(size)]
        y.backward(grads[rank])
        x_grad = torch.stack([dy @ w for dy, w in zip(grads, weights, strict=True)]).sum(0)
        torch.testing.assert_close(shard.grad, x_grad[own])
        torch.testing.assert_close(weight.grad, grads[rank].t() @ x)


def _assert_row(
    manager: tpo.UserBufferManager, partition: TokenPartition, comm: Any, width: int, backward: bool, options: Any
) -> None:
    rank, size, total = manager.rank, manager.tp_size, partition.total
    own = partition.rows(rank)
    xs = [seeded(total, FEATURES, seed=200 + total + peer) for peer in range(size)]
    weights = [seeded(width, FEATURES, seed=300 + peer) for peer in range(size)]
    x, weight = xs[rank].clone().requires_grad_(backward), weights[rank].clone().requires_grad_(backward)
    y_shard = tpo.gemm_reduce_scatter(x, weight, comm, **options)
    y = torch.stack([a @ b.t() for a, b in zip(xs, weights, strict=True)]).sum(0)
    torch.testing.assert_close(y_shard, y[own])
    if backward:
        y_grad = seeded(total, width, seed=500)
        y_shard.backward(y_grad[own])
        torch.testing.assert_close(x.grad, y_grad @ weights[rank])
        torch.testing.assert_close(weight.grad, y_grad.t() @ xs[rank])


class LogLines(logging.Handler):
    """Context manager: what the package logs meanwhile, as (level, text)."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[str, str]] = []
        self._logger = logging.getLogger("tpoverlap")

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))

    def __enter__(self) -> LogLines:
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)

    def having(self, text: str) -> list[str]:
        """The lines that contain ``text``."""
        return [line for _, line in self.lines if text in line]
