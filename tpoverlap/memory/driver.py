"""What tpoverlap asks of a GPU's driver, behind one interface: stream memory operations, copies and events.

Two implementations: `tpoverlap.memory.cuda_driver.CudaDriver`, and `tpoverlap.testing.simulated.SimulatedDriver`, which
does the same with worker threads and shared memory, so that the code for GPUs runs and is tested on a CPU.

Streams are the driver's handles (integers), addresses are device addresses of this process.
"""

from __future__ import annotations

import ctypes
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch

from tpoverlap.errors import BackendUnavailableError
from tpoverlap.native import NativeCalls

Work = Callable[[], object]

WAIT_32, WRITE_32, WAIT_64, WRITE_64 = 1, 2, 4, 5
WAIT_GEQ, WAIT_EQ, WRITE_ORDERED = 0, 1, 0
"""Wait until cyclically at least; until equal. Write after a fence at system scope: data first, then its flag."""
OPERATION_BYTES: Final = 48
MAX_OPERATIONS: Final = 48
"""Operations of one driver call; more are split."""
PACK: Final = struct.Struct("<I4xQQI4xQ8x")
"""CUstreamBatchMemOpParams: operation, address, value, flags, alias."""
MASK32: Final = 0xFFFFFFFF


class HostWords(NamedTuple):
    """32-bit words in host memory that streams may write: read through ``words``, written at ``address``."""

    words: memoryview
    address: int
    keep: object


class NativeDriver(NamedTuple):
    """What tapes need of a driver.

    Attributes:
        calls: its functions.
        event: handle of an event for ``follow``.
        failed: (status, what was called): whether to call once more; else it raises `BackendUnavailableError`.
    """

    calls: NativeCalls
    event: int
    failed: Callable[[int, str], bool]


class DriverBlockedError(BackendUnavailableError):
    """A call of the driver in this process keeps all others waiting, and there is no way around it."""


class DeviceDriver(ABC):
    """One device of this process.

    Attributes:
        simulated: torch's own work is done by the host, when it is called.
    """

    simulated: bool = False

    @abstractmethod
    def create_stream(self, label: str, *, high_priority: bool) -> int:
        """A stream of this process, until `close`."""

    @abstractmethod
    def caller_stream(self) -> int:
        """The stream that the calling thread's torch work goes to.

        Raises:
            BackendUnavailableError: it is being captured in a graph.
        """

    @abstractmethod
    def launch(self, stream: int, work: Work) -> None:
        """Have the torch work that ``work`` launches go to ``stream``."""

    @abstractmethod
    def current(self, stream: int) -> AbstractContextManager[object]:
        """`launch` for a block."""

    @abstractmethod
    def submit(self, stream: int, operations: MemoryOperations) -> None:
        """Enqueue ``operations``, in their order, in one call. They may be overwritten when this returns."""

    @abstractmethod
    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        """Enqueue a copy of device memory, for a copy engine."""

    @abstractmethod
    def record(self, stream: int) -> Any:
        """An event after what ``stream`` was given so far; it has ``query()``."""

    @abstractmethod
    def wait_event(self, stream: int, event: Any) -> None:
        """What ``stream`` is given from here on starts after ``event``."""

    def follow(self, stream: int, leader: int) -> None:
        """What ``stream`` is given from here on starts after what ``leader`` was given so far. Callers take turns."""
        self.wait_event(stream, self.record(leader))

    def native(self) -> NativeDriver | None:
        """The calls above for a tape (`tpoverlap.native`), but for products; None: tapes are not for this driver."""
        return None

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device is idle."""

    # -- for the watchdog: reaches memory while streams are blocked ----------------------------------------------

    def export(self, address: int, size_bytes: int) -> None:  # noqa: B027  (not every driver's calls can be blocked)
        """Have this rank's memory within reach of the calls below however blocked the driver is, if possible."""

    @abstractmethod
    def read(self, address: int, into: torch.Tensor) -> None:
        """Device bytes at ``address`` into the host tensor ``into`` (uint8, from `host_bytes`)."""

    @abstractmethod
    def write(self, address: int, source: torch.Tensor) -> None:
        """The host tensor ``source`` to device bytes at ``address``, a peer's mapped memory, too."""

    @abstractmethod
    def fill(self, address: int, value: int, size_bytes: int) -> None:
        """``size_bytes`` bytes at ``address`` become ``value``."""

    # -- memory --------------------------------------------------------------------------------------------------

    @abstractmethod
    def host_bytes(self, count: int) -> torch.Tensor:
        """Zeroed uint8 host memory that `read` and `write` take."""

    @abstractmethod
    def host_words(self, count: int) -> HostWords:
        """Zeroed words that streams write and this process reads without a call of the driver."""

    @abstractmethod
    def close(self) -> None:
        """Free what the constructor and the watchdog made. Idempotent."""


class MemoryOperations:
    """Stream memory operations in the driver's own layout, collected for one call.

    Attributes:
        buffer: room for entries of `OPERATION_BYTES`; the first ``count`` count.
        address: where ``buffer`` lies; it never moves.
    """

    __slots__ = ("_pinned", "address", "buffer", "count")

    def __init__(self, room: int = MAX_OPERATIONS) -> None:
        self.buffer = bytearray(room * OPERATION_BYTES)
        self._pinned = ctypes.c_char.from_buffer(self.buffer)  # a bytearray with an exported buffer cannot be resized
        self.address = ctypes.addressof(self._pinned)
        self.count = 0
