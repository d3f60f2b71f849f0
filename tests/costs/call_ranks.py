"""Rank function of `test_calls`: how many calls one operation makes, of the driver and of Python."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import tpoverlap as tpo
from tests.comm.quick_ring_ranks import cut_early
from tests.costs.null_device import NullBackend, NullDriver
from tpoverlap.comm import collectives
from tpoverlap.tokens import TokenPartition

TOKENS, WIDTH, OUT = 256, 64, 8


@dataclass(frozen=True)
class Calls:
    """Of one operation: the driver's by name, Python functions, C functions that Python called, and the time."""

    driver: dict[str, int]
    python: int
    c: int
    host_us: float


class _DoneWork:
    def wait(self) -> None:
        """The collective is not what is counted."""

    def is_completed(self) -> bool:
        return True


def _no_collective(*args: Any, **options: Any) -> _DoneWork:
    return _DoneWork()


def calls(rank: int, size: int, repeats: int) -> dict[str, Calls]:
    """After a warm-up, without gradients; plain collectives are left out."""
    config = {
        "proj_fprop": {"method": "ring_exchange"},
        "pieces_fprop": {"method": "ring_exchange", "is_reduce_scatter": True},
        "fc1_fprop": {"method": "sequential"},
        "fc2_fprop": {"method": "sequential"},
    }
    x, w = torch.randn(TOKENS // size, WIDTH), torch.randn(OUT, WIDTH)
    h, v, y = torch.randn(TOKENS, OUT), torch.randn(WIDTH, OUT), torch.randn(TOKENS, WIDTH)
    names = [
        name for name in ("all_gather_single", "all_gather_into_tensor", "all_to_all_single") if hasattr(dist, name)
    ]
    with tpo.UserBufferManager(
        None, (TOKENS, WIDTH), torch.float32, "cpu", config, backend=NullBackend, timeout_s=30.0
    ) as mgr:
        assert mgr.channel is not None, "two ranks"
        driver = mgr.channel.transport.driver
        assert isinstance(driver, NullDriver), "the backend's"
        mgr.set_active_shape(partition=TokenPartition.even(TOKENS, size))
        qkv, proj, pieces, fc1, fc2 = (mgr.layer(name) for name in ("qkv", "proj", "pieces", "fc1", "fc2"))
        dgrad, wgrad = mgr.get("qkv_dgrad"), mgr.get("qkv_wgrad")
        operations: dict[str, Callable[[], object]] = {
            "ring all-gather": lambda: tpo.all_gather_gemm(x, w, qkv),
            "ring reduce-scatter": lambda: tpo.gemm_reduce_scatter(h, v, proj),
            "ring reduce-scatter, two pieces": lambda: tpo.gemm_reduce_scatter(h, v, pieces),
            "bulk all-gather": lambda: tpo.bulk_all_gather(x, dgrad, (h, v)),
            "bulk reduce-scatter": lambda: tpo.bulk_reduce_scatter(y, wgrad, (h, v)),
            "sequential all-gather": lambda: tpo.all_gather_gemm(x, w, fc1),
            "sequential reduce-scatter": lambda: tpo.gemm_reduce_scatter(h, v, fc2),
        }
        patches = [mock.patch.object(collectives.dist, name, _no_collective) for name in names]
        for patch in patches:
            patch.start()
        try:
            with torch.no_grad():
                with cut_early():  # how a name is cut is worked out when it is first used
                    operations["ring reduce-scatter, two pieces"]()
                return {name: _count(operation, driver, repeats) for name, operation in operations.items()}
        finally:
            for patch in patches:
                patch.stop()


def _count(operation: Callable[[], object], driver: NullDriver, repeats: int) -> Calls:
    for _ in range(5):
        operation()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        operation()
        times.append(1e6 * (time.perf_counter() - started))
    counted = [_profiled(operation, driver) for _ in range(7)]
    # The least of several: a garbage collection in between runs finalizers of other objects.
    python, c = (min(one[index] for one in counted) for index in (1, 2))
    return Calls(counted[-1][0], python, c, median(times))


def _profiled(operation: Callable[[], object], driver: NullDriver) -> tuple[dict[str, int], int, int]:
    driver.calls.clear()
    events = {"call": 0, "c_call": 0}

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event in events:
            events[event] += 1

    sys.setprofile(profile)
    try:
        operation()
    finally:
        sys.setprofile(None)
    # The lambda, and the end of the profile.
    return dict(driver.calls), events["call"] - 1, events["c_call"] - 1
