"""A simulated device that plays tapes: the C function calls back into the driver's twin and into cublasLt's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tests.gemm.columns import Columns
from tpoverlap.comm import Channel
from tpoverlap.comm.transport import DeviceTransport
from tpoverlap.errors import BackendUnavailableError
from tpoverlap.gemm.cublaslt import LtProducts
from tpoverlap.memory.driver import OPERATION_BYTES, MemoryOperations, NativeDriver
from tpoverlap.native import NativeCalls, Tape, player
from tpoverlap.overlap import tapes
from tpoverlap.testing.simulated import SimulatedBackend, SimulatedDriver, _SimulatedEvent

FAILED = 999
_EVENT = 5


class TapedDriver(SimulatedDriver):
    """Attributes:
    log: what was called, by tape or not: ("submit", stream, [operations]), ("copy", ...), ("follow", ...).
    fail: called with a name before each native call; what it raises becomes a status.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[Any, ...]] | None = None
        self.fail: Callable[[str], None] = lambda name: None
        self.errors: list[BaseException] = []
        self._last = _SimulatedEvent()
        self._leader = 0
        self._callbacks: list[Any] = []

    def native(self) -> NativeDriver:
        number = ctypes.c_uint64
        functions = {"submit": self._submit, "record": self._record, "wait": self._wait, "copy": self._copy}
        addresses = {}
        for name, function in functions.items():
            callback = ctypes.CFUNCTYPE(ctypes.c_int, *[number] * function.__code__.co_argcount)
            made = ctypes.CFUNCTYPE(ctypes.c_int, *[number] * (function.__code__.co_argcount - 1))(
                self._guarded(name, function)
            )
            del callback
            self._callbacks.append(made)
            addresses[name] = ctypes.cast(made, ctypes.c_void_p).value
        return NativeDriver(NativeCalls(**addresses), _EVENT, self._failed)

    def _guarded(self, name: str, function: Callable[..., None]) -> Callable[..., int]:
        def call(*arguments: int) -> int:
            try:
                self.fail(name)
                function(*arguments)
            except BaseException as error:
                self.errors.append(error)
                return FAILED
            return 0

        return call

    def _failed(self, status: int, what: str) -> bool:
        raise BackendUnavailableError(f"{what} failed with {status}") from (self.errors or [None])[-1]

    def _submit(self, stream: int, count: int, operations: int, flags: int) -> None:
        batch = MemoryOperations(max(count, 1))
        batch.count = count
        batch.buffer[: count * OPERATION_BYTES] = ctypes.string_at(operations, count * OPERATION_BYTES)
        self.submit(stream, batch)

    def _record(self, event: int, stream: int) -> None:
        assert event == _EVENT
        self._last, self._leader = _SimulatedEvent(), stream
        self._give(stream, self._last.set)

    def _wait(self, stream: int, event: int, flags: int) -> None:
        assert event == _EVENT
        last = self._last
        self._note("follow", stream, self._leader)
        self._give(stream, lambda: last.block(self._closed))

    def _copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self.copy(stream, target, source, size_bytes)

    def _note(self, *what: Any) -> None:
        if self.log is not None:
            self.log.append(what)

    def submit(self, stream: int, operations: MemoryOperations) -> None:
        self._note("submit", stream, bytes(operations.buffer[: operations.count * OPERATION_BYTES]))
        super().submit(stream, operations)

    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        self._note("copy", stream, target, size_bytes)
        super().copy(stream, target, source, size_bytes)

    def follow(self, stream: int, leader: int) -> None:
        self._note("follow", stream, leader)
        super().follow(stream, leader)


class TapedBackend(SimulatedBackend):
    """Pass the class as ``backend=``, inside `tapes_played`."""

    name = "taped"

    def driver(self) -> TapedDriver:
        return TapedDriver()


class Played:
    """How many tapes were played."""

    def __init__(self) -> None:
        self.tapes = 0


@contextmanager
def tapes_played() -> Iterator[Played]:
    """Managers that are made inside have tapes with products."""
    played, real = Played(), Tape.play

    def make(channel: Channel) -> tapes.TapeMaker:
        assert isinstance(channel.transport, DeviceTransport)
        driver, play = channel.transport.driver, player()
        assert driver is not None and play is not None, "the caller skips where there is no compiler"
        native = driver.native()
        assert native is not None
        products = LtProducts(Columns(), 0)
        products._current_stream = lambda index: 7
        return tapes.TapeMaker(native, play, products, -1)

    def play(tape: Tape, *registers: int) -> None:
        played.tapes += 1
        real(tape, *registers)

    with mock.patch.object(tapes, "_new_maker", make), mock.patch.object(Tape, "play", play):
        yield played
