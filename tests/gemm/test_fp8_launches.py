"""How many launches quantisation takes on a GPU, and with which arguments, seen without one."""

from __future__ import annotations

import importlib
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.costs.null_fp8 import CONSTANTS, NullFp8Kernels, NullFunction, null_function
from tests.costs.null_kernels import NullKernelDriver, parameter
from tpoverlap.errors import ActiveShapeError
from tpoverlap.gemm.fp8 import DelayedScaling, Float8CurrentScaling, Float8RowwiseScaling, Fp8State, QuantizedTensor
from tpoverlap.gemm.fp8.kernels import launch as fp8_launch
from tpoverlap.gemm.fp8.kernels.launch import KernelOperations
from tpoverlap.gemm.fp8.scale_rule import ScaleRule

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
        self._ready = {}

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


# -- arguments --------------------------------------------------------------------------------------------------------

ARGUMENTS = {"amax": "QQiii", "quantize": "QQQQQiiiiiff", "transpose": "QQiiii"}


class Noted(NullFunction):
    """Notes what a launch by Triton gets."""

    def __init__(self, name: str, noted: list[tuple[Any, ...]]) -> None:
        super().__init__(name, CONSTANTS[name])
        self._noted = noted

    def binary(self, arguments: tuple[Any, ...]) -> Any:
        self._noted.append(arguments)
        return super().binary(arguments)


@pytest.mark.parametrize("transposes", [False, True])
def test_launches_by_address_get_what_triton_gets(monkeypatch: pytest.MonkeyPatch, transposes: bool) -> None:
    by_triton: list[tuple[Any, ...]] = []
    by_address: list[tuple[Any, ...]] = []
    rule, driver = ScaleRule(torch.float8_e4m3fn), NullKernelDriver()

    def note(programs: int, parameters: int) -> None:
        codes = list(ARGUMENTS.values())[len(by_address)]
        by_address.append(
            tuple(
                struct.unpack(f"<{code}", parameter(parameters, number, struct.calcsize(code)))[0]
                for number, code in enumerate(codes)
            )
        )

    def work(operations: KernelOperations, x: torch.Tensor) -> tuple[int, ...]:
        data, columns, scale = operations.quantize_local(x, rule, transposes)
        turned = operations.transpose(data)
        return (data.data_ptr(), scale.data_ptr() if columns is None else columns.data_ptr(), scale.data_ptr(),
                turned.data_ptr())  # fmt: skip

    monkeypatch.setattr(fp8_launch, "current_device", lambda: 0)
    monkeypatch.setattr(fp8_launch, "load", lambda name: Noted(name, by_triton))
    warm = NullFp8Kernels(driver)
    work(warm, X)
    assert driver.starts == 0 and len(by_triton) == 3, "the first ones are Triton's"
    driver.seen = note
    for rows, columns, pitch in ((48, 64, 64), (64, 256, 256), (7, 48, 64), (4096, 128, 128), (1, 16, 16)):
        x = torch.zeros(rows, pitch, dtype=torch.bfloat16)[:, :columns]
        by_address.clear()
        by_triton.clear()
        data, turned_along, scale, turned = work(warm, x)
        assert len(by_address) == 3 and not by_triton, "any T and width, without Triton"
        work(NullFp8Kernels(NullKernelDriver()), x)
        for address, triton, codes in zip(by_address, by_triton, ARGUMENTS.values(), strict=True):
            numbers = codes.count("Q")
            assert address[numbers:] == pytest.approx(triton[numbers:], rel=1e-7), (rows, columns)
        amax, quantize, transpose = by_address
        assert amax[0] == quantize[0] == x.data_ptr() and amax[1] == quantize[1]
        assert quantize[2:5] == (scale, data, turned_along) and transpose[:2] == (data, turned)


def test_what_is_not_aligned_goes_by_another_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    by_triton: list[tuple[Any, ...]] = []
    monkeypatch.setattr(fp8_launch, "current_device", lambda: 0)
    monkeypatch.setattr(fp8_launch, "load", lambda name: Noted(name, by_triton))
    driver, whole = NullKernelDriver(), torch.zeros(9, 64, dtype=torch.bfloat16)
    kernels = NullFp8Kernels(driver)
    for x in (whole, whole[:, :33], whole[:, 1:34]):
        for _ in range(2):
            kernels.maxima(x)
    assert (len(by_triton), driver.starts) == (3, 3), "one binary each: of the last one no address is known"


def test_another_device_is_made_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        seen.append(index)
        with monkeypatch.context() as patch:
            patch.setattr(fp8_launch, "current_device", lambda: index)
            yield

    monkeypatch.setattr(fp8_launch, "current_device", lambda: 1)
    monkeypatch.setattr(fp8_launch, "load", null_function)
    monkeypatch.setattr(torch.cuda, "device", device)
    driver = NullKernelDriver()
    kernels = NullFp8Kernels(driver)
    for _ in range(2):
        kernels.quantize_local(X, ScaleRule(torch.float8_e4m3fn), True)
    assert (driver.starts, seen) == (2, [0] * 4)


def test_sizes_beyond_32_bits_are_refused() -> None:
    wide = torch.empty_strided((2, 16), (1 << 36, 1), dtype=torch.bfloat16, device="meta")
    with pytest.raises(ActiveShapeError, match=r"fewer than 2\*\*31 rows and columns, got \[2, 16\], rows 68719476736"):
        fp8_launch._source(wide)
