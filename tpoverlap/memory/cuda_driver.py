"""`DeviceDriver` on NVIDIA GPUs: the few driver calls of the hot path, through ctypes.

`cuda.bindings` wraps every argument and every result in an object, which costs more than the call; a batch of stream
memory operations (``cuStreamBatchMemOp``) also saves the calls themselves. The library is loaded on first use.
"""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Final

import torch

from tpoverlap.errors import BackendUnavailableError
from tpoverlap.memory.driver import DeviceDriver, HostWords, MemoryOperations, NativeDriver, Work
from tpoverlap.native import NativeCalls

logger = logging.getLogger("tpoverlap")
_INVALID_CONTEXT: Final = 201
"""A thread that has made no CUDA call yet, as autograd's may be, has no current context."""


_current_device: Final = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class CudaDriver(DeviceDriver):
    """The driver for one GPU.

    Raises:
        BackendUnavailableError: there is no driver library, or it is too old for batched stream memory operations.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        library = _library()
        self._batch = _function(library, ("cuStreamBatchMemOp_v2", "cuStreamBatchMemOp"), "pipi")
        self._copy = _function(library, ("cuMemcpyDtoDAsync_v2",), "uuup")
        self._record_event = _function(library, ("cuEventRecord",), "pp")
        self._wait_event = _function(library, ("cuStreamWaitEvent",), "ppi")
        self._get_context = _function(library, ("cuCtxGetCurrent",), "p")
        self._set_context = _function(library, ("cuCtxSetCurrent",), "p")
        self._error_name = _function(library, ("cuGetErrorName",), "ip")
        self._current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or _current_raw_stream
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._side: Any = None
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)  # makes the context, so that it can be asked for
            context = ctypes.c_void_p()
            self._check(self._get_context(ctypes.addressof(context)), "cuCtxGetCurrent")
        self._context = context.value
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))  # torch makes it when it is recorded first
        self._event_handle = int(self._event.cuda_event)

    def create_stream(self, label: str, *, high_priority: bool) -> int:
        # A transfer that is ready must not queue behind GEMMs, so comm streams get high priority.
        stream = torch.cuda.Stream(device=self._device, priority=-1 if high_priority else 0)
        handle = int(stream.cuda_stream)
        self._streams[handle] = stream
        return handle

    def caller_stream(self) -> int:
        if torch.cuda.is_current_stream_capturing():
            # Epochs are counted on the host, so a replay would wait for flags of the captured run.
            raise BackendUnavailableError(
                "this release cannot be captured in a CUDA graph; capture around the tpoverlap calls instead"
            )
        handle: int = self._current_stream(self._index)
        if handle == 0 and _current_device() != self._index:
            self._require_own_context()
        return handle

    def _require_own_context(self) -> None:
        """Stream 0 is the default one of whichever device is current: words for another GPU would order nothing here.

        Where none is, this device's is made current on the way (`_again`).
        """
        context = ctypes.c_void_p()
        self._check(self._get_context(ctypes.addressof(context)), "cuCtxGetCurrent")
        if context.value is not None and context.value != self._context:
            raise BackendUnavailableError(
                f"this manager is on {self._device}, and another CUDA device is current in this thread; call "
                f"torch.cuda.set_device({self._index}) first, or use `with torch.cuda.device({self._index}):`"
            )

    def launch(self, stream: int, work: Work) -> None:
        with torch.cuda.stream(self._torch_stream(stream)):
            work()

    def current(self, stream: int) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._torch_stream(stream))

    def submit(self, stream: int, operations: MemoryOperations) -> None:
        status = self._batch(stream, operations.count, operations.address, 0)
        if status:
            arguments = (stream, operations.count, operations.address, 0)
            self._again(status, "stream memory operations", self._batch, *arguments)

    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        status = self._copy(target, source, size_bytes, stream)
        if status:
            what = f"a copy of {size_bytes} bytes to a peer"
            self._again(status, what, self._copy, target, source, size_bytes, stream)

    def record(self, stream: int) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._torch_stream(stream))
        return event

    def wait_event(self, stream: int, event: torch.cuda.Event) -> None:
        self._torch_stream(stream).wait_event(event)

    def follow(self, stream: int, leader: int) -> None:
        # One event for all: whoever waits for it waits for what was recorded before the call.
        event = self._event_handle
        status = self._record_event(event, leader)
        if status:
            self._again(status, "recording an event", self._record_event, event, leader)
        status = self._wait_event(stream, event, 0)
        if status:
            self._again(status, "waiting for an event", self._wait_event, stream, event, 0)

    def native(self) -> NativeDriver:
        launch = _function(_library(), ("cuLaunchKernelEx",), "pppp")
        functions = (self._batch, self._record_event, self._wait_event, self._copy, launch)
        calls = NativeCalls(*[ctypes.cast(one, ctypes.c_void_p).value for one in functions])
        return NativeDriver(calls, self._event_handle, self._failed_natively)

    def _failed_natively(self, status: int, what: str) -> bool:
        if status == _INVALID_CONTEXT:
            context = ctypes.c_void_p()
            self._check(self._get_context(ctypes.addressof(context)), "cuCtxGetCurrent")
            if context.value != self._context:
                self._check(self._set_context(self._context), "cuCtxSetCurrent")
                return True
        self._check(status, what)
        return False

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def export(self, address: int, size_bytes: int) -> None:
        if not self._side_channel().export(_library(), address, size_bytes):
            logger.debug("%s: memory at %#x cannot be reached from another process", self._device, address)

    def read(self, address: int, into: torch.Tensor) -> None:
        self._side_channel().read(address, into)

    def write(self, address: int, source: torch.Tensor) -> None:
        self._side_channel().write(address, source)

    def fill(self, address: int, value: int, size_bytes: int) -> None:
        self._side_channel().fill(address, value, size_bytes)

    def host_bytes(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.uint8, pin_memory=True)

    def host_words(self, count: int) -> HostWords:
        pinned = self.host_bytes(4 * count)  # mapped, at the same address, wherever addressing is unified
        return HostWords(pinned.numpy().data.cast("I"), pinned.data_ptr(), pinned)

    def close(self) -> None:
        if self._side is not None:
            self._side.close()

    def _side_channel(self) -> Any:
        if self._side is None:
            from tpoverlap.memory.cuda_side_channel import SideChannel

            self._side = SideChannel(self._device)
        return self._side

    def _torch_stream(self, handle: int) -> torch.cuda.Stream:
        stream = self._streams.get(handle)
        if stream is None:
            if handle == 0:
                stream = torch.cuda.default_stream(self._device)
            else:
                stream = torch.cuda.ExternalStream(handle, device=self._device)
            if len(self._streams) < 64:  # callers' streams; some frameworks make new ones all the time
                self._streams[handle] = stream
        return stream

    def _again(self, status: int, what: str, function: Any, *arguments: int) -> None:
        if status == _INVALID_CONTEXT:
            self._check(self._set_context(self._context), "cuCtxSetCurrent")
            status = function(*arguments)
        self._check(status, what)

    def _check(self, status: int, what: str) -> None:
        if status:
            name = ctypes.c_char_p()
            self._error_name(status, ctypes.addressof(name))
            text = name.value.decode() if name.value else f"error {status}"
            raise BackendUnavailableError(f"{what} failed: {text}; run `tpoverlap doctor`")


def is_profiled() -> bool:
    """Whether a profiler (nsys, ncu) listens: NVTX hands ranges to the library that it names in this variable."""
    return bool(os.environ.get("NVTX_INJECTION64_PATH"))


def _current_raw_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


@cache
def _library() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendUnavailableError(f"the NVIDIA driver's library cannot be loaded: {error}") from error


def _function(library: Any, names: tuple[str, ...], arguments: str) -> Any:
    """The first of ``names`` that ``library`` has; ``arguments``: p pointer or handle, u 64-bit, i 32-bit."""
    kinds = {"p": ctypes.c_void_p, "u": ctypes.c_uint64, "i": ctypes.c_uint32}
    for name in names:
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes = [kinds[kind] for kind in arguments]
            function.restype = ctypes.c_int
            return function
    raise BackendUnavailableError(f"the NVIDIA driver has no {names[0]}; tpoverlap needs a driver of CUDA 12 or later")
