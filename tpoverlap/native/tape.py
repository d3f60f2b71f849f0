"""What a tape is made of, and how it is played. ``tape.c`` says what each instruction does.

An operation's calls are the same each time but for a few numbers: the epoch, where the caller's tensors lie. These are
*registers*, given anew each time; everything else is written down. A `Recording` has the driver's methods ``submit``,
``copy`` and ``follow``, so whatever issues an operation's calls can write them down instead.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from tpoverlap.native.library import NativeCalls, Player

WORDS: Final = 16
PATCH, SUBMIT, FOLLOW, COPY, START, ATTRIBUTE, MULTIPLY, STORE = range(1, 9)
_NAMES: Final = {
    SUBMIT: "stream memory operations",
    FOLLOW: "an event",
    COPY: "a copy to a peer",
    START: "launching a kernel",
    ATTRIBUTE: "cublasLtMatmulDescSetAttribute",
    MULTIPLY: "cublasLtMatmul",
}
PRODUCT_CALLS: Final = (_NAMES[ATTRIBUTE], _NAMES[MULTIPLY])
"""What `Failed` hears of calls of cublasLt, whose statuses are not the driver's."""
_OFFSET_BITS: Final = 56
MOST_REGISTERS: Final = 254
Failed = Callable[[int, str], bool]
"""(status, what failed) -> whether to go on with that call again; else it raises."""


class Batch(Protocol):
    """Of stream memory operations: ``count`` of them at ``address``."""

    @property
    def count(self) -> int: ...

    @property
    def address(self) -> int: ...


def register(number: int, offset: int = 0) -> int:
    """An operand: what register ``number`` holds, plus ``offset`` bytes."""
    assert 0 <= number < MOST_REGISTERS and 0 <= offset < 1 << _OFFSET_BITS, (number, offset)
    return (number + 1 << _OFFSET_BITS) + offset


class Cell:
    """A 64-bit word of the host that a tape keeps something in."""

    def __init__(self, value: int = 0) -> None:
        self.words = (ctypes.c_uint64 * 1)(value)
        self.address = ctypes.addressof(self.words)


class TapeHead(ctypes.Structure):
    """``struct tape``."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("functions", "code", "registers", "library", "count", "at"))


class Recording:
    """Calls, in order. Operands are 64-bit numbers or `register`.

    Args:
        event: handle of the one event that `follow` uses: who waits for it waits for what was recorded before.
    """

    def __init__(self, event: int) -> None:
        self._event = event
        self.code: list[int] = []
        self.keeps: list[object] = []

    def _put(self, *words: int) -> None:
        self.code += [*words, *[0] * (WORDS - len(words))]

    def patch(self, places: Sequence[tuple[int, int]]) -> None:
        """Write operands to words of this process: (address, operand) each."""
        flat = [number for place in places for number in place]
        table = (ctypes.c_uint64 * len(flat))(*flat)
        self.keeps.append(table)
        self._put(PATCH, ctypes.addressof(table), len(places))

    def store(self, address: int, value: int) -> None:
        """Write the lower half of an operand to a word of 32 bits of this process."""
        self._put(STORE, address, value)

    def submit(self, stream: int, operations: Batch) -> None:
        """`DeviceDriver.submit`."""
        self.keeps.append(operations)
        self._put(SUBMIT, stream, operations.count, operations.address)

    def follow(self, stream: int, leader: int) -> None:
        """`DeviceDriver.follow`."""
        self._put(FOLLOW, stream, leader, self._event)

    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        """`DeviceDriver.copy`."""
        self._put(COPY, stream, target, source, size_bytes)

    def start(self, config: int, function: int, parameters: int, keeps: object) -> None:
        """Launch a kernel: addresses as for cuLaunchKernelEx."""
        self.keeps.append(keeps)
        self._put(START, config, function, parameters)

    def attribute(self, product: int, attribute: int, kept: Cell, value: int) -> None:
        """A pointer attribute of a product, set when it is no longer what ``kept`` says."""
        self.keeps.append(kept)
        self._put(ATTRIBUTE, product, attribute, kept.address, value)

    def multiply(self, arguments: Sequence[int], keeps: object) -> None:
        """cublasLtMatmul, with all its arguments but the library's handle."""
        assert len(arguments) == WORDS - 1, len(arguments)
        self.keeps.append(keeps)
        self._put(MULTIPLY, *arguments)


class Tape:
    """A recording that is played, by one thread at a time.

    Args:
        play: the C function.
        calls: what the instructions call.
        library: cublasLt's handle, 0 without products.
        recording: what was written down.
        num_registers: how many `play` is given.
        failed: asked when a call fails.
    """

    __slots__ = ("_at", "_count", "_failed", "_head", "_keeps", "_names", "_pack", "_play", "_registers")

    def __init__(
        self,
        play: Player,
        calls: NativeCalls,
        library: int,
        recording: Recording,
        num_registers: int,
        failed: Failed,
    ) -> None:
        code = (ctypes.c_uint64 * len(recording.code))(*recording.code)
        self._registers = bytearray(8 * max(num_registers, 1))
        registers = ctypes.addressof(ctypes.c_char.from_buffer(self._registers))
        self._pack = struct.Struct(f"<{num_registers}Q").pack_into
        self._count = len(recording.code) // WORDS
        self._names = [_NAMES.get(one, "a tape") for one in recording.code[::WORDS]]
        self._head = TapeHead(ctypes.addressof(calls), ctypes.addressof(code), registers, library, self._count, 0)
        self._at = ctypes.addressof(self._head)
        self._keeps = (code, calls, tuple(recording.keeps))
        self._play, self._failed = play, failed

    def play(self, *registers: int) -> None:
        """Make the calls.

        Raises:
            what ``failed`` raises for a call that fails; those behind it are not made.
        """
        self._pack(self._registers, 0, *registers)
        while status := self._play(self._at):
            try:
                again = self._failed(status, self._names[self._head.at])
            except BaseException:
                self._head.at = 0
                raise
            assert again, "else it raised"
