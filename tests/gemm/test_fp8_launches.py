"""How many launches quantisation takes on a GPU, counted without one: kernels are counted instead of launched."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tpoverlap.gemm.fp8 import DelayedScaling, Float8CurrentScaling, Float8RowwiseScaling, Fp8State, QuantizedTensor
from tpoverlap.gemm.fp8.kernels.launch import KernelOperations

quantize_module = importlib.import_module("tpoverlap.gemm.fp8.quantize")  # the package's name for it is a function
# These launch nothing.
FREE = {
    "empty",
    "new_empty",
    "empty_strided",
    "view",
    "detach",
    "t",
    "slice",
    "alias",
    "as_strided",
    "expand",
    "select",
}
FREE |= {"transpose", "unsqueeze", "reshape", "_unsafe_view", "empty_like"}


class CountedKernels(KernelOperations):
    """Results are uninitialised memory."""

    def __init__(self, counts: Counter[str]) -> None:
        self._interpreted = False
        self._counts = counts

    def _launch(self, name: str, *arguments: Any) -> None:
        self._counts[name.partition(".")[2]] += 1


class CountedTorch(TorchDispatchMode):
    """Counts torch's operations that would launch a kernel or a copy."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in FREE:
            self._counts[f"torch.{name}"] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    found: Counter[str] = Counter()
    kernels = CountedKernels(found)
    monkeypatch.setattr(quantize_module, "operations_on", lambda device: kernels)
    with CountedTorch(found):
        yield found


X = torch.zeros(48, 64, dtype=torch.bfloat16)
CURRENT = {"amax_tiles": 1, "quantize_tiles": 1}


def test_current_scaling(counts: Counter[str]) -> None:
    state = Fp8State(Float8CurrentScaling())
    weight = state.quantized_weight(0, X, transposes=True)
    assert weight.transposed.data.shape == (64, 48)
    assert counts == CURRENT, "a weight: both orientations in one pass"
    counts.clear()
    dy = state.quantizer("grad").local(X, record=True, transposes=True)
    assert dy.padded_transposed().data.shape == (64, 48)
    assert counts == CURRENT, "an output gradient: for dgrad and for wgrad"
    counts.clear()
    state.quantizer("input").by_maxima(X, torch.empty(4, 1))
    assert counts == {"quantize_tiles": 1}, "the magnitudes of all ranks become a scale in the same kernel"
    counts.clear()
    gathered = QuantizedTensor(torch.empty(48, 64, dtype=torch.float8_e4m3fn), torch.empty(1, 1), torch.bfloat16)
    gathered.padded_transposed()
    assert counts == {"transpose_tiles": 1}, "gathered rows, for wgrad"


def test_row_wise_and_packed(counts: Counter[str]) -> None:
    state = Fp8State(Float8RowwiseScaling())
    state.quantizer("input").local(X, record=True)
    assert counts == {"quantize_rows": 1}
    counts.clear()
    packed = torch.empty(48, 68, dtype=torch.uint8)
    quantize_module.pack_rows(X, torch.float8_e4m3fn, packed)
    quantize_module.unpack_rows(packed, torch.float8_e4m3fn)
    assert counts == {"quantize_rows": 1, "unpack_rows": 1}


def test_delayed_scaling_of_what_travels(counts: Counter[str]) -> None:
    state = Fp8State(DelayedScaling())
    counts.clear()
    state.input.with_stored_scale(X)
    assert counts == {"quantize_tiles": 1, "torch.clone": 1}
