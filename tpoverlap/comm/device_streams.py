"""`Stream` and `Event` on a device, through its driver. See `tpoverlap.comm.streams` for the interface.

Memory operations are collected and handed to the driver in one call, at the latest before the stream is given anything
else. Whoever collects on one stream what another one waits for flushes it first: producers before waiters.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tpoverlap.comm.epochs import MASK
from tpoverlap.comm.streams import Event, Stream, Work
from tpoverlap.memory.driver import (
    MASK32,
    MAX_OPERATIONS,
    OPERATION_BYTES,
    PACK,
    WAIT_32,
    WAIT_64,
    WAIT_EQ,
    WAIT_GEQ,
    WRITE_32,
    WRITE_64,
    WRITE_ORDERED,
    DeviceDriver,
    HostWords,
    MemoryOperations,
)

_pack = PACK.pack_into
_HALF = 0x7FFFFFFF
_FULL = (MAX_OPERATIONS - 1) * OPERATION_BYTES
"""Room for a pair is left."""


class DeviceEvent(Event):
    """A driver's event that has been recorded."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())


class MarkEvent(Event):
    """A word in host memory that ``stream`` writes when it gets there: asking costs no call of the driver."""

    __slots__ = ("_index", "_words", "address", "stream", "value")

    def __init__(self, words: HostWords, index: int, value: int, stream: int) -> None:
        self._words = words.words
        self._index = index
        self.address = words.address + 4 * index
        self.value = value
        self.stream = stream

    def done(self) -> bool:
        return ((self._words[self._index] - self.value) & MASK32) <= _HALF  # `epochs.reached`, without the call


class DeviceStream(Stream):
    """One of the driver's streams.

    Attributes:
        handle: the driver's.
        driver: it.
        pending: bytes of what was collected.
        disturb: test hook, called before the stream is given memory operations, a copy or work.
    """

    def __init__(self, label: str, driver: DeviceDriver, handle: int) -> None:
        self.label = label
        self.driver = driver
        self.handle = handle
        self._submit = driver.submit
        self._follow = driver.follow
        self.disturb: Callable[[], None] | None = None
        self._operations = MemoryOperations()
        self._buffer = self._operations.buffer
        self.pending = 0

    @classmethod
    def create(cls, label: str, driver: DeviceDriver, *, high_priority: bool) -> DeviceStream:
        """A new stream."""
        return cls(label, driver, driver.create_stream(label, high_priority=high_priority))

    # -- memory operations: collected, in order ------------------------------------------------------------------

    def write32(self, address: int, value: int) -> None:
        """Collect: the word at ``address`` becomes ``value`` (mod 2**32), after a fence at system scope."""
        offset = self.pending
        if offset >= _FULL:
            self.flush()
            offset = 0
        _pack(self._buffer, offset, WRITE_32, address, value & MASK32, WRITE_ORDERED, 0)
        self.pending = offset + OPERATION_BYTES

    def wait32(self, address: int, value: int) -> None:
        """Collect: wait until the word at ``address`` has cyclically reached ``value``."""
        offset = self.pending
        if offset >= _FULL:
            self.flush()
            offset = 0
        _pack(self._buffer, offset, WAIT_32, address, value & MASK32, WAIT_GEQ, 0)
        self.pending = offset + OPERATION_BYTES

    def write_pair(self, address: int, first: int, second: int) -> None:
        """Collect: the 64-bit word at ``address + 8`` becomes ``second``, then that at ``address`` ``first``."""
        offset = self.pending
        if offset >= _FULL:
            self.flush()
            offset = 0
        _pack(self._buffer, offset, WRITE_64, address + 8, second, WRITE_ORDERED, 0)
        _pack(self._buffer, offset + OPERATION_BYTES, WRITE_64, address, first, WRITE_ORDERED, 0)
        self.pending = offset + 2 * OPERATION_BYTES

    def wait_pair(self, address: int, first: int, second: int) -> None:
        """Collect: wait until the words that `write_pair` writes are equal to ``first`` and ``second``."""
        offset = self.pending
        if offset >= _FULL:
            self.flush()
            offset = 0
        _pack(self._buffer, offset, WAIT_64, address, first, WAIT_EQ, 0)
        _pack(self._buffer, offset + OPERATION_BYTES, WAIT_64, address + 8, second, WAIT_EQ, 0)
        self.pending = offset + 2 * OPERATION_BYTES

    def flush(self) -> None:
        """Hand what was collected to the driver."""
        offset = self.pending
        if offset:
            self.pending = 0
            if self.disturb is not None:
                self.disturb()
            operations = self._operations
            operations.count = offset // OPERATION_BYTES
            self._submit(self.handle, operations)

    def follow(self, leader: DeviceStream) -> None:
        """What this stream is given from here on starts after what ``leader`` was given so far.

        On the device that costs next to nothing, where a word that one stream writes and the other one awaits keeps
        each of them from its next kernel for as long as a small kernel takes.
        """
        leader.flush()
        if self is not leader:
            self.flush()
            self._follow(self.handle, leader.handle)

    # -- `Stream` ------------------------------------------------------------------------------------------------

    def run(self, work: Work) -> None:
        self.flush()
        if self.disturb is not None:
            self.disturb()
        self.driver.launch(self.handle, work)

    def enqueue(self, work: Work) -> None:
        work()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.is_contiguous() and source.is_contiguous(), "a copy engine moves contiguous bytes"
        self.copy_bytes(target.data_ptr(), source.data_ptr(), source.numel() * source.element_size())

    def copy_bytes(self, target: int, source: int, size_bytes: int) -> None:
        """Copy device memory, by copy engine."""
        if self.pending:
            self.flush()
        if self.disturb is not None:
            self.disturb()
        self.driver.copy(self.handle, target, source, size_bytes)

    def current(self) -> AbstractContextManager[object]:
        self.flush()
        return self.driver.current(self.handle)

    def wait_counter(self, counters: torch.Tensor, index: int, target: int) -> None:
        self.wait32(counters.data_ptr() + index * counters.element_size(), target & MASK)

    def record(self) -> Event:
        self.flush()
        return DeviceEvent(self.driver.record(self.handle))

    def wait(self, event: Event) -> None:
        if isinstance(event, MarkEvent):
            if event.stream != self.handle and not event.done():
                self.wait32(event.address, event.value)
                self.flush()
            return
        assert isinstance(event, DeviceEvent), f"a device's stream cannot wait for {event!r}"
        self.flush()
        self.driver.wait_event(self.handle, event.event)

    def close(self) -> None:
        pass


class CallerDeviceStream(DeviceStream):
    """The caller's stream: it is current already, so work needs no switch."""

    def run(self, work: Work) -> None:
        self.flush()
        if self.disturb is not None:
            self.disturb()
        work()

    def current(self) -> AbstractContextManager[object]:
        self.flush()
        return nullcontext()


def device_stream(stream: Stream) -> DeviceStream:
    """``stream``, which is one: an exchange or signals of a device meet no other."""
    assert isinstance(stream, DeviceStream), f"a device's work on {stream!r}"
    return stream
