"""Operations by copy engine beside a GEMM, in few calls of Python: `DeviceExchange` where nobody looks closer.

The same words in the same order on the same streams, so ranks that differ in this understand each other. What
`DeviceExchange` works out transfer by transfer lies in a `WordSheet`; what depends on T are addresses and sizes of
copies. Whatever is out of the ordinary (`tpoverlap.comm.quick_operation`) is left to `DeviceExchange`.
"""

from __future__ import annotations

import logging
from copy import copy
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from tpoverlap.comm.device_signals import DeviceSignals
from tpoverlap.comm.device_streams import CallerDeviceStream, DeviceStream, MarkEvent
from tpoverlap.comm.epochs import MASK
from tpoverlap.comm.in_flight import Flight
from tpoverlap.comm.outline import Outline
from tpoverlap.comm.quick_operation import QuickOperation
from tpoverlap.comm.ring_sheet import Form, RingSheet, RingSheets
from tpoverlap.memory.driver import MemoryOperations
from tpoverlap.memory.layout import DESCRIPTOR_BYTES, DESCRIPTOR_RING
from tpoverlap.native import Recording

if TYPE_CHECKING:
    from tpoverlap.comm.channel import Channel

logger = logging.getLogger("tpoverlap")
_MOST_AHEAD: Final = DESCRIPTOR_RING // 4
"""Operations that the word stream may be ahead of the caller's; the peers' word streams may be as well."""


class _Slot(NamedTuple):
    """What one outline needs of one slot.

    Attributes:
        sheet: its words.
        sends: (as in the sheet, as there, as there, target's address, first byte in the source, bytes) a transfer.
        own: (address, bytes) of own rows; None: they are not copied, or there are none.
        fits: see `QuickRing.fits`.
    """

    sheet: RingSheet
    sends: list[tuple[MemoryOperations | None, bool, MemoryOperations, int, int, int]]
    own: tuple[int, int] | None
    fits: bool


Turn = tuple[CallerDeviceStream, int, Flight, _Slot, MarkEvent]
"""An operation that is open: the caller's stream, the epoch, what the watchdog sees, the slot, and its end."""


class QuickRing(QuickOperation):
    """Operations of one outline and form, one after the other. Whoever opens one ends it or fails it, then leaves.

    Args:
        channel, signals: on a device.
        outline: of the form's order.
        form: see `Form`.
        base_row: the activation's first row in what is sent.
        own_first: first element of own rows in the local slot, for a form that copies them.
        own_elements: how many they have.

    Attributes:
        rank, num_peers: this rank, and how many others there are.
        dtype: of the rows that move.
        leave: ends the turn.
        fits: False: it takes more operations at a time than the driver takes, or a larger slot; use an `Exchange`.
    """

    def __init__(
        self,
        channel: Channel,
        signals: DeviceSignals,
        outline: Outline,
        form: Form,
        base_row: int = 0,
        own_first: int = 0,
        own_elements: int = 0,
    ) -> None:
        super().__init__(channel, signals, outline)
        comm, words, driver = channel.comm_stream, channel.word_stream, channel.transport.driver
        assert isinstance(comm, DeviceStream) and isinstance(words, DeviceStream) and driver is not None, "a device"
        self._comm, self._words, self.leave = comm, words, channel.leave
        self._copy, self._submit, self._follow = driver.copy, driver.submit, driver.follow
        self.form, self._base_row, self._at_once = form, base_row, form.order == "at_once"
        self._own_first, self._own_elements = own_first, own_elements
        self._sheets = channel.resource("ring sheets", RingSheets)
        self._slots: list[_Slot | None] = [None] * self.region.depth
        self._is_recorder = False
        self.rank, self.num_peers = channel.rank, channel.tp_size - 1
        self.dtype, self.steps = outline.dtype, outline.steps
        # The slot of the next use: a T that is seen once needs no other.
        self.fits = self._slot((self.region.uses + 1) % self.region.depth).fits

    def _slot(self, number: int) -> _Slot:
        """Made when it is first used."""
        addresses, itemsize = self._signals.slot_addresses(self.region, number), self.dtype.itemsize
        sheet = self._sheets.at(self._signals, self.region.name, number, addresses, self.form, self.steps)
        most, fits, first_row, places = self.region.slot_bytes, sheet.fits, self._base_row, addresses.data
        transfers = [] if self._at_once else [transfer for step in self.steps for transfer in step.sends]
        sends = []
        for (before, follows, batch), transfer in zip(sheet.sends, transfers, strict=True):
            _, _, peer, _, start, stop, element, col_start, col_stop = transfer
            row_bytes, offset = (col_stop - col_start) * itemsize, element * itemsize
            size_bytes = (stop - start) * row_bytes
            fits = fits and offset + size_bytes <= most
            sends.append((before, follows, batch, places[peer] + offset, (start - first_row) * row_bytes, size_bytes))
        own = None
        if self.form.own and self._own_elements:
            own = places[self.rank] + self._own_first * itemsize, self._own_elements * itemsize
            fits = fits and (self._own_first + self._own_elements) * itemsize <= most
        made = self._slots[number] = _Slot(sheet, sends, own, fits)
        return made

    def open(self) -> Turn | None:
        """Claim the next use of the region. None: it is out of the ordinary, and nothing was claimed.

        Then comes `fill`, or a tape that is given `numbers`.
        """
        comm = self._comm
        if comm.disturb is not None or self._words.disturb is not None:
            return None
        claimed = self._claim()
        if claimed is None:
            return None
        caller, epoch, flight = claimed
        try:
            if comm.pending:  # an operation that is still open held it back
                comm.flush()
            number = epoch % self.region.depth
            slot = self._slots[number] or self._slot(number)
            end = self._signals.next_mark(caller.handle)
        except BaseException as error:
            self._fail_claimed(error, claimed, comm)
            self._channel.leave()
            raise
        return caller, epoch, flight, slot, end

    def numbers(self, turn: Turn) -> tuple[int, int, int, int, int, int, int]:
        """What `WordSheet.fill` takes, and a tape's first registers."""
        _, epoch, flight, _, end = turn
        descriptor = flight.descriptor
        return (
            epoch & MASK,
            (epoch - self.region.depth) & MASK,
            descriptor.sequence % DESCRIPTOR_RING * DESCRIPTOR_BYTES,
            descriptor.record,
            descriptor.digest,
            end.address,
            end.value,
        )

    def fill(self, turn: Turn) -> None:
        """Before the first of the calls below."""
        turn[3].sheet.fill(*self.numbers(turn))

    def recorder(self, recording: Recording) -> QuickRing:
        """One whose calls are written down, for the slot of the turn they are given; nothing is called.

        Those of the tape are `fill`, `push`, `copy_own`, `start`, `send`, the waits and `finish`.
        """
        made = copy(self)
        made._submit, made._copy, made._follow = recording.submit, recording.copy, recording.follow
        made._is_recorder = True
        return made

    def push(self, turn: Turn, source: torch.Tensor) -> None:
        """Send everything; ``source`` is there from the start."""
        assert source.is_contiguous(), "a copy engine moves contiguous bytes"
        self.push_from(turn, source.data_ptr())

    def push_from(self, turn: Turn, address: int) -> None:
        """`push`, of contiguous rows that begin at ``address``."""
        slot, caller = turn[3], turn[0].handle
        submit, copy, comm = self._submit, self._copy, self._comm.handle
        sheet = slot.sheet
        if sheet.start is not None:
            self.start(turn)
        for before, follows, batch, target, first, size_bytes in slot.sends:
            if before is not None:
                submit(comm, before)
            if follows:
                self._follow(comm, caller)
            submit(comm, batch)
            copy(comm, target, address + first, size_bytes)
        if sheet.sent is not None:
            submit(comm, sheet.sent)

    def copy_own(self, turn: Turn, source: torch.Tensor) -> None:
        """Of a form that copies own rows, behind everything that was sent.

        Before the waits, but after a GEMM that they are not needed for: this is a kernel, it waits for the copies to
        the peers, and with one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) so does all that comes after it.
        """
        own, address = turn[3].own, source.data_ptr()
        if own is not None and own[0] != address:  # else the caller wrote them there
            self._copy(self._comm.handle, own[0], address, own[1])

    def copy_own_from(self, turn: Turn, address: int) -> None:
        """`copy_own`, of rows that lie somewhere else, at ``address``."""
        own = turn[3].own
        if own is not None:
            self._copy(self._comm.handle, own[0], address, own[1])

    def has_own(self, turn: Turn, source: torch.Tensor) -> bool:
        """Whether ``source`` lies where `copy_own` would put it."""
        own = turn[3].own
        return own is not None and own[0] == source.data_ptr()

    def start(self, turn: Turn) -> None:
        """Of a sheet that has a start: before the first transfer, or the kernel that moves the rows."""
        batch, caller = turn[3].sheet.start, turn[0].handle
        assert batch is not None, "asked before"
        if self._at_once:
            words = self._words.handle
            if not self._is_recorder and self.is_far_ahead(turn):
                self._follow(words, caller)
            self._submit(words, batch)
            self._follow(caller, words)
        else:
            self._follow(self._comm.handle, caller)
            self._submit(self._comm.handle, batch)

    def is_far_ahead(self, turn: Turn) -> bool:
        """Whether the word stream must follow the caller's before `start`; a tape does without.

        Behind the words of a recent operation it is behind its kernels: else it would run as far ahead as the host
        does, over descriptors that nobody has read.
        """
        return self._at_once and turn[2].descriptor.sequence - self._signals.words_behind > _MOST_AHEAD

    def send(self, turn: Turn, number: int, address: int) -> None:
        """Transfer ``number`` of a form "behind": its rows are computed, in what begins at ``address``."""
        slot, comm = turn[3], self._comm.handle
        before, _, batch, target, first, size_bytes = slot.sends[number]
        if before is not None:
            self._submit(comm, before)
        self._follow(comm, turn[0].handle)
        self._submit(comm, batch)
        self._copy(comm, target, address + first, size_bytes)
        if number == len(slot.sends) - 1 and slot.sheet.sent is not None:
            self._submit(comm, slot.sheet.sent)

    def wait(self, turn: Turn, group: int) -> None:
        """The caller's stream goes on once the steps of that group are here."""
        sheet = turn[3].sheet
        listener = (self._comm if sheet.comm_waits else self._words).handle
        self._submit(listener, sheet.waits[group])
        self._follow(turn[0].handle, listener)

    def wait_own(self, turn: Turn) -> None:
        """The caller's stream goes on once own rows are here, too, of a form that copies them. After `wait`."""
        if not turn[3].sheet.comm_waits:
            self._follow(turn[0].handle, self._comm.handle)

    def wait_all(self, turn: Turn) -> None:
        """The caller's stream goes on once everything is here, own rows among it if the form copies them."""
        for group in range(len(turn[3].sheet.waits)):
            self.wait(turn, group)
        if self.form.own:
            self.wait_own(turn)

    def finish(self, turn: Turn) -> None:
        """After the slot's last reader: join the comm stream, give the credits, tell the host."""
        sheet, words, stream = turn[3].sheet, self._words.handle, turn[0].handle
        if not self._at_once and not sheet.comm_waits:
            self._follow(stream, self._comm.handle)
        self._follow(words, stream)
        self._submit(words, sheet.end)

    def end(self, turn: Turn) -> None:
        """`finish`, and `land`."""
        self.finish(turn)
        self.land(turn)

    def land(self, turn: Turn) -> None:
        """The end, once all is enqueued."""
        _, epoch, flight, _, end = turn
        self._signals.words_behind = flight.descriptor.sequence
        self.region.last_reader[epoch % self.region.depth] = end
        self._channel.in_flight.land(flight, end)

    def fail(self, error: BaseException, turn: Turn) -> None:
        """Instead of `end`: peers are told what this was, then that it failed."""
        self._fail_claimed(error, turn[:3], self._comm)
