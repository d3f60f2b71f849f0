"""Sheets of words for operations that move rows by copy engine, or by the kernel that multiplies them.

`tpoverlap.comm.device_exchange` says which words these are; a batch is what it hands over in one call.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from tpoverlap.comm.device_signals import DeviceSignals, SlotAddresses
from tpoverlap.comm.outline import Order
from tpoverlap.comm.schedule import Step, Transfer, in_pieces
from tpoverlap.comm.word_sheet import WordSheet
from tpoverlap.memory.driver import MemoryOperations

_MOST_SHEETS: Final = 256


class Form(NamedTuple):
    """What else the words of an operation depend on.

    Attributes:
        scatter: the direction.
        order: "beside": the rows are there from the start. "behind": each transfer's are computed on the caller's
            stream before it. "at_once": a kernel there moves them.
        own: own rows are copied into the local slot, too.
        waits: for what the caller's stream waits at a time; "none": the kernel waits for rows, and the caller's
            stream behind it only for the peers' descriptors.
    """

    scatter: bool
    order: Order
    own: bool = False
    waits: Literal["step", "piece", "all", "none"] = "all"


class RingSheet(WordSheet):
    """The words of one slot, for schedules with the same pieces.

    Attributes:
        start: the first batch: the word stream's where a kernel moves the rows; else the comm stream's, where no
            transfer is the first to follow the caller's stream; else None.
        sends: one a transfer, in order: the comm stream's batch before it follows the caller's stream again (None:
            it has nothing to do before), whether it does follow, and its batch before the copy.
        sent: the comm stream's after the last transfer; None: there was none.
        waits: one for each of `groups`; where a kernel moves the rows, one that compares the descriptors.
        comm_waits: the comm stream awaits them: there is one group, and nothing is sent after it.
        end: the word stream's, behind the caller's last kernel.
    """

    start: MemoryOperations | None = None
    sent: MemoryOperations | None = None

    def __init__(self, signals: DeviceSignals, slot: SlotAddresses, form: Form, steps: tuple[Step, ...]) -> None:
        super().__init__()
        self._signals, self._slot, self._expected = signals, slot, set[int]()
        self.sends: list[tuple[MemoryOperations | None, bool, MemoryOperations]] = []
        self.waits: list[MemoryOperations] = []
        if form.order == "at_once":
            self._publish_all()
            for step in steps:
                if step.sends:
                    self.wait_due(slot.credit_in[step.sends[0].destination])
            self.start = self.end_batch()
            for peer in signals.peers:
                self._expect(peer)
            self.waits.append(self.end_batch())
            self.comm_waits = False
        else:
            self._transfers(form, steps)
            self.comm_waits = len(self.waits) == 1
        for peer in signals.peers:
            self._expect(peer)
        for peer in signals.peers:
            self.write_epoch(slot.credit_out[peer])
        self.mark_done()
        self.end = self.end_batch()

    def _transfers(self, form: Form, steps: tuple[Step, ...]) -> None:
        """All but the end."""
        transfers = [transfer for step in steps for transfer in step.sends]
        early = not transfers or (form.order == "behind" and not steps[0].sends)
        if early:
            self._publish_all()
            self.start = self.end_batch()
        for number, transfer in enumerate(transfers):
            follows, before = form.order == "behind" or (number == 0 and not early), None
            if number:
                self._arrived(transfers[number - 1])  # held back until now: one call of the driver less
                if follows:
                    before = self.end_batch()
            if number == 0 and not early:
                self._publish_all()
            self.wait_due(self._slot.credit_in[transfer.destination])
            self.sends.append((before, follows, self.end_batch()))
        if transfers:
            self._arrived(transfers[-1])
            self.sent = self.end_batch()
        for group in groups(steps, form):
            for step in group:
                self._expect(step.peer)
                for transfer in step.receives:
                    self.wait_epoch(self._slot.arrival_in[transfer.source] + 4 * transfer.piece)
            self.waits.append(self.end_batch())

    def _publish_all(self) -> None:
        for _, ring in self._signals.descriptors_out:
            self.publish(ring)

    def _expect(self, peer: int) -> None:
        """Unless that was done."""
        if peer not in self._expected:
            self._expected.add(peer)
            self.expect(self._signals.descriptors_in[peer])

    def _arrived(self, transfer: Transfer) -> None:
        self.write_epoch(self._slot.arrival_out[transfer.destination] + 4 * transfer.piece)


def groups(steps: tuple[Step, ...], form: Form) -> list[list[Step]]:
    """Steps that the caller's stream waits for at a time. Only the last one of a group may receive rows, unless all do.

    A group in which nothing is received can only be the last.
    """
    if form.waits == "none":
        return []
    if form.waits == "all":
        return [list(steps)]
    if form.waits == "piece":
        steps = tuple(piece for step in steps for piece in in_pieces(step))
    found: list[list[Step]] = [[]]
    seen: set[int] = set()
    for step in steps:
        if step.receives or step.peer not in seen:  # else it is a piece that only this rank sends
            found[-1].append(step)
            seen.add(step.peer)
        if step.receives:
            found.append([])
    return [group for group in found if group]


class RingSheets:
    """Sheets of one channel, made once each."""

    def __init__(self) -> None:
        self._sheets: dict[tuple[object, ...], RingSheet] = {}

    def at(
        self,
        signals: DeviceSignals,
        region: str,
        slot: int,
        addresses: SlotAddresses,
        form: Form,
        steps: tuple[Step, ...],
    ) -> RingSheet:
        """The sheet of a slot for schedules with pieces like those of ``steps``."""
        key = (region, slot, form, *[(len(step.sends), len(step.receives)) for step in steps])
        found = self._sheets.get(key)
        if found is None:
            if len(self._sheets) >= _MOST_SHEETS:
                self._sheets.clear()  # who uses one has it in hand
            found = self._sheets[key] = RingSheet(signals, addresses, form, steps)
        return found
