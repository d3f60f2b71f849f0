"""Prepared launches of the exchange kernels, on a GPU that does nothing."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.costs.null_kernels import NullKernelDriver, no_compiler
from tpoverlap.comm.descriptor import Descriptor
from tpoverlap.comm.outline import Outline
from tpoverlap.gemm.triton.kernel_driver import LaunchConfig
from tpoverlap.gemm.triton.trade_launcher import TradeLauncher
from tpoverlap.overlap.kernel_trader import KernelTrader
from tpoverlap.tokens import TokenPartition

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
CPU = torch.device("cpu")


class Streams(NullKernelDriver):
    """Notes the stream of each launch."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[int] = []

    def _start(self, config: int, function: int, parameters: int, extra: int) -> int:
        self.streams.append(LaunchConfig.from_address(config).stream)
        return super()._start(config, function, parameters, extra)


class Slot:
    """Addresses, at which nothing is."""

    rank, depth, size_bytes = 0, 2, 1 << 16

    def __init__(self) -> None:
        self.data = self.arrival_out = self.arrival_in = self.credit_out = self.credit_in = [256, 512]


def test_each_stream_has_launches_of_its_own() -> None:
    """A launch is found again by what it is; on another stream it would not be ordered with the caller's tensors."""
    driver = Streams()
    signals: Any = SimpleNamespace(descriptor_addresses=lambda: ([64, 128], 192))
    slot = cast(Any, Slot())
    outline = Outline("fc1_fprop all-gather sequential", TokenPartition.even(4, 2), torch.float32)
    descriptor, end = Descriptor(1, outline.label, 4, 0), cast(Any, SimpleNamespace(address=8, value=1))
    own, summands, out = torch.empty(2, 8), torch.empty(4, 8), torch.empty(2, 8)
    with no_compiler():
        trader = KernelTrader(signals, TradeLauncher(CPU, 10.0, driver=driver))
        for stream in (5, 6, 5):
            trader.gather(outline, slot, 1, descriptor, stream, own)
            trader.add(outline, slot, 1, descriptor, stream, summands, None, out, end)
    assert driver.streams == [5, 5, 6, 6, 5, 5]
