"""Rank function of `test_trade_calls`: calls of a `sequential` operation whose exchange is one kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch

import tpoverlap as tpo
from tests.costs.call_ranks import OUT, TOKENS, WIDTH, Calls, _count
from tests.costs.null_device import NullBackend, NullDriver
from tests.costs.null_kernels import NullKernelDriver, no_compiler
from tpoverlap.gemm.triton.trade_launcher import TradeLauncher
from tpoverlap.overlap import kernel_trader
from tpoverlap.tokens import TokenPartition


@dataclass(frozen=True)
class TradeCalls:
    """Of one operation: kernels of ours that it starts, and the rest."""

    starts: int
    calls: Calls


def trade_calls(rank: int, size: int, repeats: int) -> dict[str, TradeCalls]:
    """After a warm-up, without gradients; neither the driver nor a kernel does anything."""
    config = {name: {"method": "sequential"} for name in ("fc1_fprop", "fc2_fprop")}
    x, w = torch.randn(TOKENS // size, WIDTH), torch.randn(OUT, WIDTH)
    h, v = torch.randn(TOKENS, OUT), torch.randn(WIDTH, OUT)
    kernels = NullKernelDriver()
    found: dict[str, TradeCalls] = {}
    with (
        mock.patch.object(kernel_trader, "TradeLauncher", partial(TradeLauncher, driver=kernels)),
        mock.patch.object(kernel_trader, "kernels_missing", lambda device: None),
        no_compiler(),
        tpo.UserBufferManager(
            None, (TOKENS, WIDTH), torch.float32, "cpu", config, backend=NullBackend, timeout_s=30.0
        ) as mgr,
        torch.no_grad(),
    ):
        assert mgr.channel is not None, "two ranks"
        driver = mgr.channel.transport.driver
        assert isinstance(driver, NullDriver), "the backend's"
        mgr.set_active_shape(partition=TokenPartition.even(TOKENS, size))
        fc1, fc2 = mgr.layer("fc1"), mgr.layer("fc2")
        operations: dict[str, Callable[[], object]] = {
            "all-gather": lambda: tpo.all_gather_gemm(x, w, fc1),
            "reduce-scatter": lambda: tpo.gemm_reduce_scatter(h, v, fc2),
        }
        for name, operation in operations.items():
            calls = _count(operation, driver, repeats)
            before = kernels.starts
            operation()
            found[name] = TradeCalls(kernels.starts - before, calls)
    return found
