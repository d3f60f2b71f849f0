"""A device that is none: the code for GPUs, on a CPU, with real concurrency between and inside processes.

``UserBufferManager(..., device="cpu", backend=SimulatedBackend)`` runs what a manager on GPUs runs (`DeviceExchange`,
`DeviceSignals`, the watchdog's release by poison), but its driver is a `SimulatedDriver`: device memory is the shared
memory of the backend "shared", a stream is a thread that does what it was given in order, and a wait polls. As on a
GPU, a wait has no time-out of its own, and an error comes with a later call or with ``mgr.check()``. The caller's
stream does everything at once, in the calling thread, because torch's work on a CPU does so too.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from tpoverlap.comm.epochs import reached
from tpoverlap.errors import BackendUnavailableError
from tpoverlap.memory.driver import (
    OPERATION_BYTES,
    PACK,
    WAIT_32,
    WAIT_64,
    WRITE_32,
    WRITE_64,
    DeviceDriver,
    HostWords,
    MemoryOperations,
    Work,
)
from tpoverlap.memory.shared import SharedMemoryBackend

CALLER: Final = 0
"""The handle of the caller's stream."""
_SPINS = 50
_POLL_S = 1e-4


class SimulatedBackend(SharedMemoryBackend):
    """The arenas of "shared", used by way of a driver. Pass the class as ``backend=``."""

    name = "simulated"

    def driver(self) -> SimulatedDriver:
        return SimulatedDriver()


class SimulatedDriver(DeviceDriver):
    """See the module's text.

    Attributes:
        calls: name -> how often it was called; what a driver's call costs is what the code for GPUs has to save.
    """

    simulated = True

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self._closed = threading.Event()
        self._errors: list[BaseException] = []
        self._raised = False
        self._streams: list[_SimulatedStream] = []
        self._keep: list[object] = []

    def create_stream(self, label: str, *, high_priority: bool) -> int:
        self._streams.append(_SimulatedStream(label, self._closed, self._errors))
        return len(self._streams)

    def caller_stream(self) -> int:
        return CALLER

    def launch(self, stream: int, work: Work) -> None:
        self._count("launch")
        self._give(stream, work)

    def current(self, stream: int) -> AbstractContextManager[object]:
        raise BackendUnavailableError("a block of torch work cannot be moved to a simulated stream; use launch()")

    def submit(self, stream: int, operations: MemoryOperations) -> None:
        self._count("submit")
        batch = bytes(operations.buffer[: operations.count * OPERATION_BYTES])
        self._give(stream, lambda: _execute(batch, self._closed))

    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        self._count("copy")
        self._give(stream, lambda: ctypes.memmove(target, source, size_bytes))

    def record(self, stream: int) -> _SimulatedEvent:
        self._count("record")
        event = _SimulatedEvent()
        self._give(stream, event.set)
        return event

    def wait_event(self, stream: int, event: Any) -> None:
        self._count("wait_event")
        self._give(stream, lambda: event.block(self._closed))

    def follow(self, stream: int, leader: int) -> None:
        self._count("follow")
        event = _SimulatedEvent()
        self._give(leader, event.set)
        self._give(stream, lambda: event.block(self._closed))

    def synchronize(self) -> None:
        for number in range(1, len(self._streams) + 1):
            self.record(number).block(self._closed)

    def read(self, address: int, into: torch.Tensor) -> None:
        ctypes.memmove(into.data_ptr(), address, into.numel())

    def write(self, address: int, source: torch.Tensor) -> None:
        ctypes.memmove(address, source.data_ptr(), source.numel())

    def fill(self, address: int, value: int, size_bytes: int) -> None:
        ctypes.memset(address, value, size_bytes)

    def host_bytes(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.uint8)

    def host_words(self, count: int) -> HostWords:
        words = torch.zeros(4 * count, dtype=torch.uint8)
        self._keep.append(words)
        return HostWords(words.numpy().data.cast("I"), words.data_ptr(), words)

    def close(self) -> None:
        self._closed.set()
        for stream in self._streams:
            stream.close()

    def __del__(self) -> None:  # a manager that was dropped without close ends its threads too
        self._closed.set()
        for stream in self._streams:
            stream.queue.put(None)

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def _give(self, stream: int, work: Work) -> None:
        if self._errors and not self._raised:  # a launch that fails raises at once on a GPU; here at the next call
            self._raised = True
            raise self._errors[0]
        if stream == CALLER:
            work()
        else:
            self._streams[stream - 1].queue.put(work)


class _SimulatedEvent:
    def __init__(self) -> None:
        self._flag = threading.Event()

    def query(self) -> bool:
        return self._flag.is_set()

    def set(self) -> None:
        self._flag.set()

    def block(self, closed: threading.Event) -> None:
        while not self._flag.wait(0.05):
            if closed.is_set():
                return


class _SimulatedStream:
    """A thread that does its work in order. After `close` it skips what is left."""

    def __init__(self, label: str, closed: threading.Event, errors: list[BaseException]) -> None:
        self.queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_drain, args=(self.queue, closed, errors), name=f"tpoverlap-{label}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self.queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10.0)


def _drain(work_queue: queue.SimpleQueue[Work | None], closed: threading.Event, errors: list[BaseException]) -> None:
    torch.set_grad_enabled(False)
    while (work := work_queue.get()) is not None:
        if not closed.is_set():
            try:
                work()
            except BaseException as error:
                errors.append(error)
        del work  # it may hold tensors; do not keep them until the next one comes


def _execute(batch: bytes, closed: threading.Event) -> None:
    for operation, address, value, _, _ in PACK.iter_unpack(batch):
        if operation == WRITE_32:
            ctypes.c_uint32.from_address(address).value = value
        elif operation == WRITE_64:
            ctypes.c_uint64.from_address(address).value = value
        elif operation == WAIT_32:
            word32 = ctypes.c_uint32.from_address(address)
            _poll(lambda word=word32, least=value: reached(word.value, least), closed)
        else:
            assert operation == WAIT_64, f"operation {operation} is none that tpoverlap uses"
            word64 = ctypes.c_uint64.from_address(address)
            _poll(lambda word=word64, wanted=value: word.value == wanted, closed)


def _poll(is_reached: Any, closed: threading.Event) -> None:
    turns = 0
    while not is_reached():
        turns += 1
        if closed.is_set():
            return
        time.sleep(0 if turns < _SPINS else _POLL_S)
