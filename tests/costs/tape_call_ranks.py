"""Rank functions of `test_tape_calls`: Python calls of operations that are played, where native calls do nothing."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import tpoverlap as tpo
from tests.comm.quick_ring_ranks import cut_early
from tests.costs.call_ranks import Calls, _count
from tests.costs.null_device import NullBackend, NullDriver
from tests.costs.null_kernels import NullKernelDriver, no_compiler
from tests.gemm.columns import Columns
from tests.overlap.fused_ranks import context_of, forced_form
from tpoverlap.comm import Channel
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.gemm.cublaslt import LtProducts
from tpoverlap.gemm.cublaslt.library import NativeLibrary
from tpoverlap.gemm.triton.launcher import GemmLauncher
from tpoverlap.gemm.triton.trade_launcher import TradeLauncher
from tpoverlap.memory.driver import NativeDriver
from tpoverlap.native import NativeCalls, player
from tpoverlap.overlap import fused, kernel_trader, tapes
from tpoverlap.tokens import TokenPartition

TOKENS, WIDTH, OUT = 256, 64, 8
CONFIG = {
    "proj_fprop": {"method": "ring_exchange"},
    "pieces_fprop": {"method": "ring_exchange", "is_reduce_scatter": True},
    "fc1_fprop": {"method": "sequential"},
    "fc1_dgrad": {"method": "sequential"},
    "fc2_fprop": {"method": "sequential"},
}


def _nothing(stack: ExitStack) -> int:
    """Address of a function that does nothing."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "nothing.c").write_text("int nothing(void) { return 0; }\n")
    compiler = next(found for name in ("cc", "gcc", "clang") if (found := shutil.which(name)))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "nothing.so", folder / "nothing.c"], check=True)
    library = ctypes.CDLL(str(folder / "nothing.so"))
    return ctypes.cast(library.nothing, ctypes.c_void_p).value or 0


class _NoProducts(Columns):
    nothing = 0

    def native(self) -> NativeLibrary:
        return NativeLibrary(77, self.nothing, self.nothing)


def tape_calls(rank: int, size: int, repeats: int) -> dict[str, Calls]:
    """After a warm-up, without gradients. What the driver is called from Python is counted as well: nothing."""
    half, kernels = torch.float16, NullKernelDriver()

    def new(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=half)

    x, w, h, v = new(TOKENS // size, WIDTH), new(OUT, WIDTH), new(TOKENS, OUT), new(WIDTH, OUT)
    y, out, whole = new(TOKENS, WIDTH), new(TOKENS // size, WIDTH), new(TOKENS, OUT)
    with ExitStack() as stack:
        nothing = _nothing(stack)

        def make(channel: Channel) -> tapes.TapeMaker:
            library, play = _NoProducts(), player()
            library.nothing = nothing
            assert play is not None, "the caller skips where there is no compiler"
            native = NativeDriver(NativeCalls(*[nothing] * 5), 5, lambda status, what: False)
            return tapes.TapeMaker(native, play, LtProducts(library, 0), -1)

        for owner, name, value in (
            (tapes, "_new_maker", make),
            (fused, "GemmLauncher", partial(GemmLauncher, driver=kernels)),
            (fused, "require_kernels", lambda *given: None),
            (kernel_trader, "TradeLauncher", partial(TradeLauncher, driver=kernels)),
            (kernel_trader, "kernels_missing", lambda device: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(no_compiler())
        stack.enter_context(torch.no_grad())
        stack.enter_context(forced_form("one_launch"))
        mgr = stack.enter_context(
            tpo.UserBufferManager(None, (TOKENS, WIDTH), half, "cpu", CONFIG, backend=NullBackend, timeout_s=30.0)
        )
        driver: Any = mgr.channel.transport.driver  # type: ignore[union-attr]
        assert isinstance(driver, NullDriver), "the backend's"
        partition = TokenPartition.even(TOKENS, size)
        mgr.set_active_shape(partition=partition)
        qkv, proj, pieces, fc1, fc2 = (mgr.layer(name) for name in ("qkv", "proj", "pieces", "fc1", "fc2"))
        gather, scatter = (context_of(mgr, partition, scatter=one) for one in (False, True))
        operations: dict[str, Callable[[], object]] = {
            "ring all-gather": lambda: tpo.all_gather_gemm(x, w, qkv),
            "ring all-gather, read": lambda: tpo.all_gather_gemm(x, w, qkv, return_gathered=True),
            "ring reduce-scatter": lambda: tpo.gemm_reduce_scatter(h, v, proj),
            "ring reduce-scatter, two pieces": lambda: tpo.gemm_reduce_scatter(h, v, pieces),
            "bulk all-gather": lambda: tpo.bulk_all_gather(x, mgr.get("qkv_dgrad"), (h, v)),
            "bulk reduce-scatter": lambda: tpo.bulk_reduce_scatter(y, mgr.get("qkv_wgrad"), (h, v)),
            "sequential all-gather": lambda: tpo.all_gather_gemm(x, w, fc1),
            "sequential reduce-scatter": lambda: tpo.gemm_reduce_scatter(h, v, fc2),
            "fused all-gather": lambda: fused.all_gather(gather, x, RowGemm([w.t()], [None], [whole]), None),
            "fused reduce-scatter": lambda: fused.reduce_scatter(scatter, PartialGemm([h], [v.t()]), out),
        }
        with cut_early():  # how a name is cut is worked out when it is first used
            operations["ring reduce-scatter, two pieces"]()
        counted = {name: _count(operation, driver, repeats) for name, operation in operations.items()}
        before = kernels.starts
        for operation in operations.values():
            operation()
        assert kernels.starts == before, "kernels are started by tapes"
        return counted
