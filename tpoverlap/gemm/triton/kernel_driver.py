"""The driver calls of a launch: start a kernel, encode a tensor map, ask for the current stream. Through ctypes."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Final

import torch

from tpoverlap.errors import BackendUnavailableError

DATA_TYPES: Final = MappingProxyType(
    {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9, torch.float8_e4m3fn: 0, torch.float8_e5m2: 0}
)
"""CUtensorMapDataType; FP8 travels as bytes."""
_INVALID_CONTEXT: Final = 201
_L2_PROMOTION_128: Final = 2
_SMALL_TENSOR_BYTES: Final = 128 * 1024
_LAST_DRIVER_WITH_SMALL_TENSOR_BIT: Final = 13010


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: grid, block, dynamic shared memory, stream, attributes."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("attributes", ctypes.c_uint64),
        ("num_attributes", ctypes.c_uint32),
    )


class KernelDriver(ABC):
    """One device.

    Attributes:
        multiprocessors: how many it has.
        has_tma: whether it copies tiles by tensor map.
        start: (address of a `LaunchConfig`, function, address of the array of parameter addresses, 0) -> status.
        current_stream: () -> handle of the calling thread's current stream.
    """

    multiprocessors: int
    has_tma: bool
    start: Callable[[int, int, int, int], int]
    current_stream: Callable[[], int]

    @abstractmethod
    def encode(
        self,
        address: int,
        rows: int,
        columns: int,
        row_bytes: int,
        box: tuple[int, int],
        swizzle: int,
        data_type: int,
        itemsize: int,
    ) -> bytes:
        """A tensor map, see `MapShape`."""

    @abstractmethod
    def start_again(self, status: int, config: int, function: int, parameters: int) -> None:
        """After ``start`` returned ``status``: once more if the thread had no context, else raise."""


class CudaKernelDriver(KernelDriver):
    """An NVIDIA GPU.

    Raises:
        BackendUnavailableError: the driver's library is missing or lacks a function.
    """

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self.has_tma = torch.cuda.get_device_capability(device)[0] >= 9
        pointer, number = ctypes.c_void_p, ctypes.c_uint32
        self.start = _function("cuLaunchKernelEx", [pointer] * 4)
        self._encode = _function("cuTensorMapEncodeTiled", [pointer, number, number, *[pointer] * 5, *[number] * 4])
        self._set_context = _function("cuCtxSetCurrent", [pointer])
        self._error_name = _function("cuGetErrorName", [number, pointer])
        raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or _current_raw_stream
        self.current_stream = partial(raw_stream, index)
        version, context = ctypes.c_int(), ctypes.c_void_p()
        self._check(_function("cuDriverGetVersion", [pointer])(ctypes.addressof(version)), "cuDriverGetVersion")
        self._small_tensor_bit = version.value <= _LAST_DRIVER_WITH_SMALL_TENSOR_BIT
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)  # makes the context, so that it can be asked for
            self._check(_function("cuCtxGetCurrent", [pointer])(ctypes.addressof(context)), "cuCtxGetCurrent")
        self._context = context.value
        self._scratch = ctypes.create_string_buffer(128 + 64)

    def encode(
        self,
        address: int,
        rows: int,
        columns: int,
        row_bytes: int,
        box: tuple[int, int],
        swizzle: int,
        data_type: int,
        itemsize: int,
    ) -> bytes:
        made = (ctypes.addressof(self._scratch) + 63) & ~63
        lengths = (ctypes.c_uint64 * 2)(columns, rows)  # innermost first
        strides = (ctypes.c_uint64 * 1)(row_bytes)
        block, steps = (ctypes.c_uint32 * 2)(box[1], box[0]), (ctypes.c_uint32 * 2)(1, 1)
        status = self._encode(
            made, data_type, 2, address, ctypes.addressof(lengths), ctypes.addressof(strides), ctypes.addressof(block),
            ctypes.addressof(steps), 0, swizzle, _L2_PROMOTION_128, 0,
        )  # fmt: skip
        self._check(status, f"a tensor map of [{rows}, {columns}], rows {row_bytes} bytes apart, at {address:#x}")
        encoded = bytearray(ctypes.string_at(made, 128))
        if self._small_tensor_bit and (rows - 1) * row_bytes + (columns - 1) * itemsize + 1 < _SMALL_TENSOR_BYTES:
            encoded[10] &= ~(1 << 5) & 0xFF  # bit 21 of the second word: a driver's error, as CUTLASS works round it
        return bytes(encoded)

    def start_again(self, status: int, config: int, function: int, parameters: int) -> None:
        if status == _INVALID_CONTEXT:  # a thread that has made no CUDA call yet
            self._check(self._set_context(self._context), "cuCtxSetCurrent")
            status = self.start(config, function, parameters, 0)
        self._check(status, "launching a kernel")

    def _check(self, status: int, what: str) -> None:
        if status:
            name = ctypes.c_char_p()
            self._error_name(status, ctypes.addressof(name))
            text = name.value.decode() if name.value else f"error {status}"
            raise BackendUnavailableError(f"{what} failed: {text}; run `tpoverlap doctor`")


def _current_raw_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


@cache
def _library() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")  # not PyDLL: a full launch queue blocks, and the watchdog must run meanwhile
    except OSError as error:
        raise BackendUnavailableError(f"the NVIDIA driver's library cannot be loaded: {error}") from error


def _function(name: str, arguments: list[Any]) -> Any:
    function = getattr(_library(), name, None)
    if function is None:
        raise BackendUnavailableError(f"the NVIDIA driver has no {name}; tpoverlap needs a driver of CUDA 12 or later")
    function.argtypes = arguments
    function.restype = ctypes.c_int
    return function
