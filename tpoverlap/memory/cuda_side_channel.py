"""How the watchdog reaches device memory while the streams of this process may be blocked in a wait.

===================  =================================================  ===============================================
way                  works                                              costs
===================  =================================================  ===============================================
a stream of its own  nearly always                                      a stream
a second context     where streams share a hardware queue with a        a few hundred MiB of device memory, on first
                     blocked one (`CUDA_DEVICE_MAX_CONNECTIONS=1`):     need
                     it has queues of its own
another process      where a call of the driver waits for the blocked   the same, and a second or two
                     stream, and all others for that call
                     (`tpoverlap.memory.cuda_rescue`)
===================  =================================================  ===============================================

The driver is called by a thread of its own, which may stay in a call for ever; the caller goes another way then. A
peer's memory cannot be reached from another process (what was imported cannot be exported again): that is done once the
driver is free, and DriverBlockedError says so.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from cuda.bindings import driver

from tpoverlap.errors import BackendUnavailableError
from tpoverlap.memory.cuda_rescue import RescueProcess, Share, export
from tpoverlap.memory.driver import DriverBlockedError

logger = logging.getLogger("tpoverlap")
_PROMPTLY_S: Final = 0.25
_BLOCKED_S: Final = 3.0
"""A call of the driver that takes longer is taken for blocked; making a context takes less."""
Call = Callable[[], object]
Outside = Callable[[RescueProcess], object]


class Caller:
    """A thread that calls what it is given, in order."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Call, queue.SimpleQueue[tuple[Any, BaseException | None]]] | None] = (
            queue.SimpleQueue()
        )
        self._given, self._returned = 0, 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tpoverlap-side-channel", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a call has not returned."""
        return self._given != self._returned

    def call(self, function: Call, limit_s: float) -> Any:
        """What ``function`` returns, or raises; DriverBlockedError after ``limit_s``: it is called nevertheless.

        One thread at a time.
        """
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._given += 1
        self._calls.put((function, answer))
        try:
            result, error = answer.get(timeout=limit_s)
        except queue.Empty:
            raise DriverBlockedError(
                "a call of the CUDA driver in this process waits for a stream, and all others wait for it (the first "
                "use of a kernel is such a call, and so is freeing device memory)"
            ) from None
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Call nothing more. Idempotent."""
        self._closed = True
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None and not self._closed:
            function, answer = item
            try:
                outcome: tuple[Any, BaseException | None] = function(), None
            except BaseException as error:
                outcome = None, error
            self._returned += 1
            answer.put(outcome)


class SideChannel:
    """Small blocking copies and fills of device memory. Used by the watchdog's thread and by error paths only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._context: Any = None
        self._caller: Caller | None = None
        self._shares: list[Share] = []
        self._rescue: RescueProcess | None = None
        self._uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-").replace("-", "")
        self._lock = threading.Lock()
        # A data loader's workers are forks, and a descriptor of theirs would keep the memory after this has ended.
        os.register_at_fork(after_in_child=partial(_close_shares, weakref.ref(self)))

    def export(self, cuda: Any, address: int, size_bytes: int) -> bool:
        """Have memory at ``address`` within reach of another process. False: its owner did not make it for that.

        Args:
            cuda: the driver's library.
        """
        share = export(cuda, address, size_bytes)
        if share is not None:
            self._shares.append(share)
        return share is not None

    def read(self, address: int, into: torch.Tensor) -> None:
        """Device bytes at ``address`` into the pinned uint8 tensor ``into``."""
        size, host = into.numel(), into.data_ptr()

        def from_outside(process: RescueProcess) -> None:
            into.numpy()[:] = memoryview(process.read(address, size))

        self._do(
            address,
            size,
            lambda stream, kept=into: driver.cuMemcpyDtoHAsync(host, address, size, stream),
            lambda: driver.cuMemcpyDtoH(host, address, size),
            from_outside,
        )

    def write(self, address: int, source: torch.Tensor) -> None:
        """The pinned uint8 tensor ``source``, which is not changed afterwards, to device bytes at ``address`` (a peer's
        mapped memory, too).
        """
        size, host = source.numel(), source.data_ptr()
        self._do(
            address,
            size,
            lambda stream, kept=source: driver.cuMemcpyHtoDAsync(address, host, size, stream),
            lambda: driver.cuMemcpyHtoD(address, host, size),
            lambda process: process.write(address, source.numpy().tobytes()),
        )

    def fill(self, address: int, value: int, size_bytes: int) -> None:
        """``size_bytes`` bytes at ``address`` become ``value``."""
        self._do(
            address,
            size_bytes,
            lambda stream: driver.cuMemsetD8Async(address, value, size_bytes, stream),
            lambda: driver.cuMemsetD8(address, value, size_bytes),
            lambda process: process.fill(address, value, size_bytes),
        )

    def _do(self, address: int, size_bytes: int, enqueue: Any, directly: Any, outside: Outside) -> None:
        with self._lock:
            if self._caller is None:
                self._caller = Caller()
            exported = any(share.covers(address, size_bytes) for share in self._shares)
            busy = self._caller.busy
            if busy and exported:
                self._from_outside(outside)
                return
            try:
                if self._context is None:
                    limit_s = 0.0 if busy else _PROMPTLY_S + _BLOCKED_S
                    if self._caller.call(lambda: self._on_a_stream(enqueue), limit_s):
                        return
                    self._caller.call(self._make_context, _BLOCKED_S)
                self._caller.call(lambda: self._in_second_context(directly), 0.0 if busy else _BLOCKED_S)
            except DriverBlockedError:
                if not exported:
                    raise
                self._from_outside(outside)

    def _on_a_stream(self, enqueue: Any) -> bool:
        """False: it has been enqueued, and is not done promptly."""
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(device=self._device, priority=-1)
            _check(enqueue(driver.CUstream(int(self._stream.cuda_stream))))
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

    def _in_second_context(self, directly: Any) -> None:
        _check(driver.cuCtxPushCurrent(self._context))
        try:
            _check(directly())
        finally:
            driver.cuCtxPopCurrent()

    def _from_outside(self, outside: Outside) -> None:
        try:
            if self._rescue is None:
                logger.warning(
                    "a call of the CUDA driver waits for a stream that waits for a peer, and blocks the watchdog: "
                    "starting a process that reaches device memory from outside"
                )
                self._rescue = RescueProcess(self._uuid, self._shares)
            outside(self._rescue)
        except BackendUnavailableError as error:
            rescue, self._rescue = self._rescue, None  # the next call starts another one
            if rescue is not None:
                rescue.close()
            raise DriverBlockedError(f"the CUDA driver is blocked in this process, and {error}") from error

    def close(self) -> None:
        """Destroy the second context, if there is one, and end the process. Idempotent."""
        context, self._context = self._context, None
        blocked = self._caller is not None and self._caller.busy
        if context is not None and not blocked:
            driver.cuCtxDestroy(context)
        if self._caller is not None:
            self._caller.close()
        if self._rescue is not None:
            self._rescue.close()
        self._rescue = None
        _close_shares(weakref.ref(self))


def _close_shares(of: weakref.ref[SideChannel]) -> None:
    side = of()
    if side is not None:
        for share in side._shares:
            share.close()
        side._shares = []


def _check(result: tuple[Any, ...]) -> None:
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise BackendUnavailableError(f"the watchdog could not reach device memory: {result[0]}")
