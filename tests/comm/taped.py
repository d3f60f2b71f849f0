"""A simulated device that plays tapes: the C function calls back into the driver's twin and into cublasLt's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tests.costs.null_device import NullBackend, NullDriver
from tests.gemm.columns import Columns
from tpoverlap.comm import Channel
from tpoverlap.comm.transport import DeviceTransport
from tpoverlap.errors import BackendUnavailableError
from tpoverlap.gemm.cublaslt import LtProducts
from tpoverlap.memory.driver import OPERATION_BYTES, DeviceDriver, MemoryOperations, NativeDriver
from tpoverlap.native import NativeCalls, Tape, player
from tpoverlap.overlap import tapes
from tpoverlap.testing.simulated import SimulatedBackend, SimulatedDriver, _SimulatedEvent

FAILED = 999
_EVENT = 5


class NativeCallbacks(DeviceDriver):
    """Of a driver's twin: tapes call back into it.

    Attributes:
        fail: called with a name before each native call; what it raises becomes a status, `Refused` the one it holds.
        errors: what was raised inside native calls.
        start: launches a kernel, as cuLaunchKernelEx.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fail: Callable[[str], None] = lambda name: None
        self.errors: list[BaseException] = []
        self.start: Callable[[int, int, int, int], int] = _no_kernels
        self._callbacks: list[Any] = []

    def native(self) -> NativeDriver:
        functions = {"submit": self._submit, "record": self._record, "wait": self._wait, "copy": self._copy}
        addresses = {}
        for name, function in (functions | {"start": self._start}).items():
            kinds = [ctypes.c_uint64] * (function.__code__.co_argcount - 1)
            made = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(self._guarded(name, function))
            self._callbacks.append(made)
            addresses[name] = ctypes.cast(made, ctypes.c_void_p).value
        return NativeDriver(NativeCalls(**addresses), _EVENT, self._failed)

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., int]:
        def call(*arguments: int) -> int:
            try:
                self.fail(name)
                status: int = function(*arguments) or 0
            except Refused as refused:
                return refused.status
            except BaseException as error:
                self.errors.append(error)
                return FAILED
            return status

        return call

    def _failed(self, status: int, what: str) -> bool:
        raise BackendUnavailableError(f"{what} failed with {status}") from (self.errors or [None])[-1]

    def _submit(self, stream: int, count: int, operations: int, flags: int) -> None:
        batch = MemoryOperations(max(count, 1))
        batch.count = count
        batch.buffer[: count * OPERATION_BYTES] = ctypes.string_at(operations, count * OPERATION_BYTES)
        self.submit(stream, batch)

    def _record(self, event: int, stream: int) -> None:
        raise NotImplementedError

    def _wait(self, stream: int, event: int, flags: int) -> None:
        raise NotImplementedError

    def _copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self.copy(stream, target, source, size_bytes)

    def _start(self, config: int, function: int, parameters: int, extra: int) -> int:
        return self.start(config, function, parameters, extra)


class Refused(Exception):
    """A native call returns ``status``."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def _no_kernels(*arguments: int) -> int:
    raise AssertionError("nobody said who launches kernels")


class TapedDriver(NativeCallbacks, SimulatedDriver):
    """Attributes:
    log: what was called, by tape or not: ("submit", stream, [operations]), ("copy", ...), ("follow", ...).
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[Any, ...]] | None = None
        self._last = _SimulatedEvent()
        self._leader = 0

    def _record(self, event: int, stream: int) -> None:
        assert event == _EVENT
        self._last, self._leader = _SimulatedEvent(), stream
        self._give(stream, self._last.set)

    def _wait(self, stream: int, event: int, flags: int) -> None:
        assert event == _EVENT
        last = self._last
        self._note("follow", stream, self._leader)
        self._give(stream, lambda: last.block(self._closed))

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


class NullTapedDriver(NativeCallbacks, NullDriver):
    """Nothing waits, nothing is copied."""

    _leader = 0

    def _record(self, event: int, stream: int) -> None:
        self._leader = stream

    def _wait(self, stream: int, event: int, flags: int) -> None:
        self.follow(stream, self._leader)


class NullTapedBackend(NullBackend):
    """Pass the class as ``backend=``, inside `tapes_played`; results are garbage."""

    def driver(self) -> NullTapedDriver:
        return NullTapedDriver()


class Played:
    """How many tapes were played; the libraries of all managers; what else a test notes."""

    def __init__(self) -> None:
        self.tapes = 0
        self.products: list[Columns] = []
        self.kinds: set[str] = set()


@contextmanager
def tapes_played(new_library: Callable[[], Columns] = Columns) -> Iterator[Played]:
    """Managers that are made inside have tapes with products."""
    played, real = Played(), Tape.play

    def make(channel: Channel) -> tapes.TapeMaker:
        assert isinstance(channel.transport, DeviceTransport)
        driver, play = channel.transport.driver, player()
        assert driver is not None and play is not None, "the caller skips where there is no compiler"
        native = driver.native()
        assert native is not None
        played.products.append(new_library())
        products = LtProducts(played.products[-1], 0)
        products._current_stream = lambda index: 7
        return tapes.TapeMaker(native, play, products, -1)

    def play(tape: Tape, *registers: int) -> None:
        played.tapes += 1
        real(tape, *registers)

    with mock.patch.object(tapes, "_new_maker", make), mock.patch.object(Tape, "play", play):
        yield played
