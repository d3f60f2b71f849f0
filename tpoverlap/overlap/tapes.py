"""Who makes tapes for a channel, and when: operations whose calls C can make by itself (`tpoverlap.native`).

A tape is for one slot, one T and one kind of GEMM: it holds the sizes of copies and products. So it is written the
third time an operation of that T is there, and a T that is seen once or twice costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Final

from tpoverlap.comm import Channel
from tpoverlap.comm.transport import DeviceTransport
from tpoverlap.comm.word_sheet import NUM_REGISTERS
from tpoverlap.gemm import RowGemm
from tpoverlap.gemm.cublaslt import LtProducts, lt_products
from tpoverlap.gemm.cublaslt.library import product_failed
from tpoverlap.gemm.triton.direct import current_device
from tpoverlap.memory.driver import NativeDriver
from tpoverlap.native import MOST_REGISTERS, PRODUCT_CALLS, NativeCalls, Player, Recording, Tape, player

logger = logging.getLogger("tpoverlap")
SOURCE: Final = NUM_REGISTERS
"""The register behind an operation's numbers: what is sent, own rows [T_r, H] or partial sums [T, N]."""
RESULT: Final = SOURCE + 1
"""A reduce-scatter's: where the result [T_r, N] goes. Operands of the GEMM follow the last of these."""
SEEN_BEFORE: Final = 2
"""Operations of one kind before the one that writes its tape."""
_MOST_KINDS: Final = 64
_MOST_SEEN: Final = 1024


class TapeMaker:
    """One a channel.

    Args:
        driver: of its device.
        play: plays tapes.
        products: by cublasLt; None: tapes have none.
        index: the device's; -1: it is none of CUDA's.
    """

    def __init__(self, driver: NativeDriver, play: Player, products: LtProducts | None, index: int) -> None:
        self.products, self._driver, self._play, self._index = products, driver, play, index
        self._calls = NativeCalls.from_buffer_copy(driver.calls)
        self._library = 0
        if products is not None:
            native = products.native()
            self._library, self._calls.attribute, self._calls.multiply = native

    def recording(self) -> Recording:
        """An empty one."""
        return Recording(self._driver.event)

    def tape(self, recording: Recording, num_registers: int) -> Tape:
        """What plays ``recording``."""
        return Tape(self._play, self._calls, self._library, recording, num_registers, self._failed)

    def _failed(self, status: int, what: str) -> bool:
        if what in PRODUCT_CALLS:  # another library's numbers: the driver would give them names of its own
            raise product_failed(what, status)
        return self._driver.failed(status, what)

    @staticmethod
    def has_room(others: int, gemm: RowGemm) -> bool:
        """Whether a tape has registers enough for ``gemm``, which may have any number of matrices, after ``others``."""
        return others + gemm.num_operands <= MOST_REGISTERS

    def is_current(self) -> bool:
        """Whether the calling thread's device is the one whose products these are."""
        return self._index < 0 or current_device() == self._index


class Kinds:
    """The tapes of one plan, by what they depend on but for T.

    Args:
        maker: writes them.

    Attributes:
        get: the tapes of a key; None: there are none, or not yet: ask `new`.
        is_current: see `TapeMaker`; where it says no, tapes with products are neither written nor played.
    """

    def __init__(self, maker: TapeMaker) -> None:
        self._maker = maker
        self._seen: dict[Hashable, int] = {}
        self._tapes: dict[Hashable, Any] = {}
        self.get, self.is_current = self._tapes.get, maker.is_current

    def new(self, key: Hashable, write: Callable[[TapeMaker], Any]) -> Any:
        """What ``write`` makes, if it is time to; None: not yet, or something has to be done from Python each time."""
        if key in self._tapes:
            return None
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()  # callers' streams, or launches, that never come back
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if seen <= SEEN_BEFORE:
            return None
        if len(self._tapes) >= _MOST_KINDS:
            self._tapes.clear()
            self._seen.clear()
        found = self._tapes[key] = write(self._maker)
        return found


def kinds_of(channel: Channel | None) -> Kinds | None:
    """For one plan; None: it has no tapes."""
    maker = None if channel is None else tape_maker(channel)
    return None if maker is None else Kinds(maker)


def tape_maker(channel: Channel) -> TapeMaker | None:
    """Of ``channel``; None: its operations are started call by call from Python."""
    found: TapeMaker | None = channel.resource("tapes", partial(_new_maker, channel))
    return found


def _new_maker(channel: Channel) -> TapeMaker | None:
    if not isinstance(channel.transport, DeviceTransport):
        return None
    driver = channel.transport.driver
    assert driver is not None, "a device"
    native = driver.native()
    play = None if native is None else player()
    if native is None or play is None:
        return None
    device = channel.device
    if device.type != "cuda":
        return TapeMaker(native, play, None, -1)
    index = device.index if device.index is not None else current_device()
    return TapeMaker(native, play, lt_products(index), index)
