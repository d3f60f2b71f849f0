"""Rank function of `test_fused_calls`: Python calls of prepared `fused` operations, the launch part apart."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import FrameType
from typing import Any
from unittest import mock

import torch

import tpoverlap as tpo
from tests.costs.null_device import NullBackend
from tests.costs.null_kernels import NullKernelDriver, no_compiler
from tests.overlap.fused_ranks import context_of, forced_form
from tpoverlap.fused_form import FORMS
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.gemm.triton.launcher import GemmLauncher
from tpoverlap.overlap import fused

TOKENS, WIDTH, OUT = 256, 64, 768
LAUNCH_PART = ("/gemm/triton/", "/overlap/fused")


@dataclass(frozen=True)
class FusedCalls:
    """Of one operation.

    Attributes:
        launch: Python functions of the launch part: `LAUNCH_PART`.
        others: Python functions of everything else: the exchange, torch.
        host_us: median time.
        starts: kernels that were started.
    """

    launch: int
    others: int
    host_us: float
    starts: int


def fused_calls(rank: int, size: int, repeats: int) -> dict[str, FusedCalls]:
    """After a warm-up; neither the driver nor a kernel does anything."""
    driver = NullKernelDriver()
    partition = tpo.TokenPartition.even(TOKENS, size)
    half = torch.float16
    shards = [torch.empty(TOKENS // size, WIDTH, dtype=half) for _ in range(3)]
    weight, outs = torch.empty(OUT, WIDTH, dtype=half), [torch.empty(TOKENS, OUT, dtype=half) for _ in range(3)]
    hidden, down = torch.empty(TOKENS, OUT, dtype=half), torch.empty(WIDTH, OUT, dtype=half)
    sums = [torch.empty(TOKENS // size, WIDTH, dtype=half) for _ in range(3)]
    turn = 0
    found: dict[str, FusedCalls] = {}
    with (
        mock.patch.object(fused, "GemmLauncher", partial(GemmLauncher, driver=driver)),
        mock.patch.object(fused, "require_kernels", lambda *given: None),
        no_compiler(),
        tpo.UserBufferManager(None, (TOKENS, WIDTH), half, "cpu", backend=NullBackend, timeout_s=30.0) as manager,
    ):
        for form in FORMS:
            gather = context_of(manager, partition, scatter=False)
            scatter = context_of(manager, partition, scatter=True)

            def all_gather(context: Any = gather) -> None:
                nonlocal turn
                turn += 1
                gemm = RowGemm([weight.t()], [None], [outs[turn % 3]])
                fused.all_gather(context, shards[turn % 3], gemm, None)

            def reduce_scatter(context: Any = scatter) -> None:
                nonlocal turn
                turn += 1
                fused.reduce_scatter(context, PartialGemm([hidden], [down.t()]), sums[turn % 3])

            with forced_form(form):
                for operation in (all_gather, reduce_scatter):
                    found[f"{form} {operation.__name__}"] = _count(operation, driver, repeats)
    return found


def _count(operation: Callable[[], None], driver: NullKernelDriver, repeats: int) -> FusedCalls:
    for _ in range(130):  # every row of counters was used
        operation()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        operation()
        times.append(1e6 * (time.perf_counter() - started))
    before = driver.starts
    operation()
    starts = driver.starts - before
    launch, others = min(_profiled(operation) for _ in range(7))
    return FusedCalls(launch, others, median(times), starts)


def _profiled(operation: Callable[[], None]) -> tuple[int, int]:
    calls = [0, 0]

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            path = frame.f_code.co_filename
            calls[not any(part in path for part in LAUNCH_PART)] += 1

    sys.setprofile(profile)
    try:
        operation()
    finally:
        sys.setprofile(None)
    return calls[0], calls[1]
