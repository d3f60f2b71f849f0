"""Rank function of `test_fp8_layer_calls`: what the host does for an FP8 layer on a GPU, beside transfers and GEMMs."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import tpoverlap as tpo
from tests.costs.call_ranks import _no_collective
from tests.costs.layer_ranks import FFN, GROUPS, HEADS, HIDDEN, TOKENS, _like_cuda, _Step
from tests.costs.null_device import NullBackend
from tests.costs.null_fp8 import NullFp8Kernels, NullFunction, null_function
from tests.costs.null_kernels import NullKernelDriver
from tpoverlap.comm import collectives
from tpoverlap.gemm.fp8 import Float8CurrentScaling, scaled_tasks
from tpoverlap.gemm.fp8.kernels import launch as fp8_launch
from tpoverlap.gemm.triton.direct import DirectKernels
from tpoverlap.nn.elementwise import norms
from tpoverlap.nn.elementwise.launch import DirectKernel
from tpoverlap.tokens import TokenPartition
from tpoverlap.tools.bench.compute_only import Resident, without_collectives

PACKAGE = str(Path(tpo.__file__).parent)
NOT_COUNTED = (
    "comm",
    "overlap",
    "memory",
    "testing",
    "gemm/tasks.py",
    "gemm/fp8/scaled_tasks.py",
    "gemm/fp8/scaled_mm.py",
)
"""Transfers and GEMMs: their calls have tests of their own."""
LABELS = ("with operations", "compute only")


@dataclass(frozen=True)
class HostCalls:
    """Of one forward and backward.

    Attributes:
        python: Python functions that were called, but for those of `NOT_COUNTED`.
        c: C functions that the others, and torch, called.
        launches: of kernels.
        places: Python calls by file and function, C calls by function and who calls it.
    """

    python: int
    c: int
    launches: int
    places: dict[str, int]


@contextmanager
def like_a_gpu(driver: NullKernelDriver) -> Iterator[None]:
    """All kernels are launched by address, by ``driver``; scaled GEMMs compute nothing."""
    kernels = DirectKernels(driver)

    def direct(name: str, constants: int) -> DirectKernel:
        return DirectKernel(NullFunction(name, constants), 4, kernels)

    quantize = importlib.import_module("tpoverlap.gemm.fp8.quantize")  # the package's name for it is a function
    operations = NullFp8Kernels(driver)
    trio = tuple(direct(name, count) for name, count in (("norm", 5), ("norm_back", 5), ("sums", 2)))
    with _like_cuda(), ExitStack() as stack:

        def patch(owner: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        for name, pair in (("gated", (3, 3)), ("qkv_heads", (7, 7))):
            module = importlib.import_module(f"tpoverlap.nn.elementwise.{name}")
            patch(module, "_kernels", partial(tuple, tuple(direct(name, count) for count in pair)))
        patch(norms, "_LEAST_ELEMENTS", 0)
        patch(norms, "runs_kernels", lambda x: True)
        patch(norms, "_kernels", lambda num_warps: trio)
        patch(quantize, "operations_on", lambda device: operations)
        patch(fp8_launch, "current_device", lambda: 0)
        patch(fp8_launch, "load", null_function)
        patch(scaled_tasks, "scaled_mm", lambda *arguments, **options: None)
        yield


def fp8_layer_calls(rank: int, size: int) -> dict[str, HostCalls]:
    """The FP8 transformer layer: with its operations on a device that does nothing, and compute-only."""
    names = [
        name for name in ("all_gather_single", "all_gather_into_tensor", "all_to_all_single") if hasattr(dist, name)
    ]
    with (
        tpo.UserBufferManager(
            None,
            (TOKENS, HIDDEN),
            torch.float32,
            "cpu",
            {f"{name}_fprop": {"method": "ring_exchange"} for name in ("qkv", "fc1")},
            quantization_modes=["none", "fp8"],
            backend=NullBackend,
            timeout_s=30.0,
        ) as mgr,
        ExitStack() as stack,
    ):
        for name in names:
            stack.enter_context(mock.patch.object(collectives.dist, name, _no_collective))
        found = {}
        for label in LABELS:
            torch.manual_seed(0)
            layer = tpo.nn.TransformerLayer(
                HIDDEN, FFN, HEADS, GROUPS, normalization="RMSNorm", activation="swiglu", bias=False, manager=mgr,
                fp8_recipe=Float8CurrentScaling(),
            )  # fmt: skip
            driver = NullKernelDriver()
            with like_a_gpu(driver):
                if label == "compute only":
                    without_collectives(layer, Resident(*(torch.randn(TOKENS, HIDDEN) for _ in range(2))))
                found[label] = _count(_Step(layer, TokenPartition.even(TOKENS, size), rank), driver)
        return found


def _count(step: Callable[[], object], driver: NullKernelDriver) -> HostCalls:
    for _ in range(3):
        step()
    counted = []
    with torch.autograd.set_multithreading_enabled(False):  # or the profiler would not see the backward pass
        for _ in range(5):
            driver.starts = 0
            counted.append(_profiled(step, driver))
    return min(counted, key=lambda one: one.python + one.c)


def _profiled(step: Callable[[], object], driver: NullKernelDriver) -> HostCalls:
    events = {"call": 0, "c_call": 0}
    places: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event in events and _counts(frame):
            events[event] += 1
            code = frame.f_code
            place = f"{'/'.join(code.co_filename.split('/')[-2:])}:{code.co_qualname}"
            places[place if event == "call" else f"{argument.__qualname__} by {place}"] += 1

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return HostCalls(events["call"], events["c_call"], driver.starts, dict(places))


def _counts(frame: FrameType | None) -> bool:
    """What libraries do is done for who called them; a package's file is named relative to the package."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return not file[len(PACKAGE) + 1 :].startswith(NOT_COUNTED)
        if "/tests/" in file:
            return frame.f_code.co_name == "__call__"  # `_Step`: torch's own way to the backward pass
        frame = frame.f_back
    return False
