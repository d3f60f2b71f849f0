"""How the watchdog reaches device memory while the streams of this process may be blocked in a wait.

A stream of its own is not enough: streams share a few hardware queues (one with CUDA_DEVICE_MAX_CONNECTIONS=1), and a
copy that shares a queue with a blocked wait never runs. So a copy that does not finish promptly is repeated in a second
CUDA context, which has queues of its own. The context costs device memory and time, so it is made on first need.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from cuda.bindings import driver

from tpoverlap.errors import BackendUnavailableError

logger = logging.getLogger("tpoverlap")
_PROMPTLY_S = 0.25


class SideChannel:
    """Small blocking copies and fills of device memory. Used by the watchdog's thread and by error paths only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device=device, priority=-1)
        self._context: Any = None

    def read(self, address: int, into: torch.Tensor) -> None:
        """Device bytes at ``address`` into the pinned uint8 tensor ``into``."""
        size, host = into.numel(), into.data_ptr()
        self._do(
            lambda stream: driver.cuMemcpyDtoHAsync(host, address, size, stream),
            lambda: driver.cuMemcpyDtoH(host, address, size),
        )

    def write(self, address: int, source: torch.Tensor) -> None:
        """The pinned uint8 tensor ``source`` to device bytes at ``address`` (a peer's mapped memory, too)."""
        size, host = source.numel(), source.data_ptr()
        self._do(
            lambda stream: driver.cuMemcpyHtoDAsync(address, host, size, stream),
            lambda: driver.cuMemcpyHtoD(address, host, size),
        )

    def fill(self, address: int, value: int, size_bytes: int) -> None:
        """``size_bytes`` bytes at ``address`` become ``value``."""
        self._do(
            lambda stream: driver.cuMemsetD8Async(address, value, size_bytes, stream),
            lambda: driver.cuMemsetD8(address, value, size_bytes),
        )

    def _do(self, enqueue: Any, directly: Any) -> None:
        if self._context is None:
            with torch.cuda.device(self._device):
                _check(enqueue(driver.CUstream(int(self._stream.cuda_stream))))
                if self._finishes_promptly():
                    return
            self._make_context()
        _check(driver.cuCtxPushCurrent(self._context))
        try:
            _check(directly())
        finally:
            driver.cuCtxPopCurrent()

    def _finishes_promptly(self) -> bool:
        deadline = time.monotonic() + _PROMPTLY_S
        while not self._stream.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _make_context(self) -> None:
        logger.warning("the watchdog's stream shares a hardware queue with a blocked one: making a second CUDA context")
        index = self._device.index or 0
        try:
            result = driver.cuCtxCreate(None, 0, index)
        except TypeError:  # before CUDA 13 the call takes no creation parameters
            result = driver.cuCtxCreate(0, index)
        _check(result)
        self._context = result[1]
        driver.cuCtxPopCurrent()

    def close(self) -> None:
        """Destroy the second context, if there is one. Idempotent."""
        context, self._context = self._context, None
        if context is not None:
            driver.cuCtxDestroy(context)


def _check(result: tuple[Any, ...]) -> None:
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise BackendUnavailableError(f"the watchdog could not reach device memory: {result[0]}")
