"""Tapes by themselves: operands, and calls that fail."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gemm.columns import Columns
from tpoverlap.errors import BackendUnavailableError, TpOverlapError
from tpoverlap.gemm.cublaslt import LtProducts
from tpoverlap.memory.cuda_driver import CudaDriver
from tpoverlap.memory.driver import NativeDriver
from tpoverlap.native import MOST_REGISTERS, Cell, NativeCalls, Player, Recording, Tape, player, register
from tpoverlap.overlap import tapes

number = ctypes.c_uint64
KINDS = {"submit": 4, "record": 2, "wait": 3, "copy": 4, "start": 4, "attribute": 4}
EVENT = 5


@pytest.fixture
def play() -> Player:
    found = player()
    if found is None:
        pytest.skip("tapes need a C compiler")
    return found


class Calls:
    """Functions that note their arguments, and return what `statuses` says."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.statuses: list[int] = []
        self.keep = [
            ctypes.CFUNCTYPE(ctypes.c_int, *[number] * count)(self._noting(name)) for name, count in KINDS.items()
        ]
        addresses = [ctypes.cast(one, ctypes.c_void_p).value or 0 for one in self.keep]
        self.native = NativeCalls(**dict(zip(KINDS, addresses, strict=True)))

    def _noting(self, name: str) -> Callable[..., int]:
        def call(*arguments: int) -> int:
            self.made.append((name, *arguments))
            return self.statuses.pop(0) if self.statuses else 0

        return call

    def tape(self, play: Player, recording: Recording, registers: int, failed: Any = None) -> Tape:
        return Tape(play, self.native, 77, recording, registers, failed or (lambda status, what: False))


def test_registers_and_offsets(play: Player) -> None:
    """The last one, too, and whatever 64 bits it holds; a word of 32 bits leaves its neighbour alone."""
    calls, recording, words = Calls(), Recording(EVENT), (number * 3)(1, 2, 3)
    at, last = ctypes.addressof(words), MOST_REGISTERS - 1
    recording.patch([(at, register(0, 8)), (at + 8, register(last)), (at + 16, 0xFFFFFFFF)])
    recording.store(at + 16, register(last))
    recording.copy(register(0), register(last, (1 << 56) - 1), 4096, 1 << 40)
    recording.follow(3, 4)
    tape = calls.tape(play, recording, MOST_REGISTERS)
    for value in (0, (1 << 64) - 9, 1 << 56):
        given = [value, *[0] * (MOST_REGISTERS - 2), (1 << 63) + 5]
        tape.play(*given)
        assert list(words) == [(value + 8) % (1 << 64), (1 << 63) + 5, 5]
        reached = ((1 << 63) + 5 + (1 << 56) - 1) % (1 << 64)
        assert calls.made == [("copy", reached, 4096, 1 << 40, value), ("record", EVENT, 4), ("wait", 3, EVENT, 0)]
        calls.made.clear()


def test_what_failed_is_called_again_or_nothing_more_is(play: Player) -> None:
    calls, recording, asked = Calls(), Recording(EVENT), list[tuple[int, str]]()
    recording.copy(1, 2, 3, 4)
    recording.follow(3, 4)
    recording.copy(5, 6, 7, 8)

    def failed(status: int, what: str) -> bool:
        asked.append((status, what))
        if status == 201:
            return True
        raise BackendUnavailableError(what)

    tape = calls.tape(play, recording, 0, failed)
    whole = [("copy", 2, 3, 4, 1), ("record", EVENT, 4), ("wait", 3, EVENT, 0), ("copy", 6, 7, 8, 5)]
    calls.statuses = [0, 0, 201]
    tape.play()
    assert calls.made == [*whole[:3], *whole[1:]] and asked == [(201, "an event")]
    for position in range(4):
        calls.made.clear()
        calls.statuses = [*[0] * position, 700]
        with pytest.raises(BackendUnavailableError):
            tape.play()
        assert calls.made == whole[: position + 1], "what comes after it is not called"
        calls.made.clear()
        tape.play()
        assert calls.made == whole, "the next time it begins at the beginning"


def test_an_attribute_is_set_when_it_changes(play: Player) -> None:
    calls, recording, kept = Calls(), Recording(EVENT), Cell()
    recording.attribute(9, 17, kept, register(0, 4))
    tape = calls.tape(play, recording, 1, lambda status, what: status == 1)
    for value, made in ((12, 1), (12, 0), (28, 1), (12, 1)):
        calls.made.clear()
        tape.play(value)
        assert len(calls.made) == made and kept.words[0] == value + 4
    calls.made.clear()
    calls.statuses = [1]
    tape.play(40)
    assert calls.made == [("attribute", 9, 17, kept.address, 8)] * 2, "not as if it had been set"


def test_cublaslts_statuses_are_not_the_drivers(play: Player) -> None:
    """Its 3 is no memory, the driver's 3 is not initialised."""
    calls, recording = Calls(), Recording(EVENT)
    recording.attribute(9, 17, Cell(), 4)
    recording.copy(1, 2, 3, 4)

    def failed(status: int, what: str) -> bool:
        raise BackendUnavailableError(f"the driver's {status}: {what}")

    tape = tapes.TapeMaker(NativeDriver(calls.native, EVENT, failed), play, None, -1).tape(recording, 0)
    calls.statuses = [3]
    with pytest.raises(TpOverlapError, match=r"SetAttribute failed with status 3 \(allocation failed\)"):
        tape.play()
    calls.statuses = [0, 3]
    with pytest.raises(BackendUnavailableError, match="the driver's 3: a copy to a peer"):
        tape.play()


@pytest.mark.parametrize(("current", "again"), [(0, True), (0x2000, True), (0x1000, False)])
def test_a_thread_without_a_context(current: int, again: bool) -> None:
    """It gets the device's, and the call is made once more; whoever has it learns what failed."""
    driver: Any = object.__new__(CudaDriver)
    driver._context, contexts = 0x1000, [current]

    def get_context(address: int) -> int:
        ctypes.c_void_p.from_address(address).value = contexts[-1]
        return 0

    def set_context(context: int) -> int:
        contexts.append(context)
        return 0

    driver._get_context, driver._set_context, driver._error_name = get_context, set_context, lambda *given: 1
    if again:
        assert driver._failed_natively(201, "launching a kernel") and contexts[-1] == 0x1000
    with pytest.raises(BackendUnavailableError, match="launching a kernel failed: error 201"):
        driver._failed_natively(201, "launching a kernel")
    with pytest.raises(BackendUnavailableError, match="a copy failed: error 700"):
        driver._failed_natively(700, "a copy")
    assert len(contexts) == 1 + again


@pytest.mark.parametrize("biased", [False, True])
def test_descriptors_are_freed_once(biased: bool) -> None:
    """With the tape that they are for; what a family keeps for other products stays."""
    library = Columns()
    lt, half = LtProducts(library, 0), torch.bfloat16
    left, weight, out = torch.ones(16, 48, dtype=half), torch.ones(24, 48, dtype=half), torch.empty(16, 24, dtype=half)
    bias = torch.ones(24, dtype=half) if biased else None
    lt._current_stream = lambda index: 7
    assert lt.multiply(left, weight.t(), out, None, bias)
    family = set(range(len(library.layouts))), set(range(len(library.products)))
    for _ in range(3):
        recording, where = Recording(EVENT), (register(0), register(1), register(2), register(2))
        assert lt.record(recording, 7, left, weight.t(), out, None, bias, where, register(3))
        made = set(range(len(library.layouts))) - family[0], set(range(len(library.products))) - family[1]
        assert not {*made[0], *[~one for one in made[1]]} <= library.freed, "while it may be played"
        del recording
        gc.collect()
        assert {*made[0], *[~one for one in made[1]]} == library.freed, "`Columns` says if anything is freed twice"
    assert len(library.products) == 1 + 3 * biased
    assert lt.multiply(left, weight.t(), out, None, bias), "the family is whole"
