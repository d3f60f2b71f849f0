"""All memory operations of one operation on a device, written down before it starts but for what each use changes.

Which words are written and awaited, and in which order, depends on the slot and on which ranks have how many pieces,
not on T. So a sheet is made once, and a use fills in a few numbers and hands the batches to the driver.
"""

from __future__ import annotations

from typing import Final

from tpoverlap.memory.driver import (
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
    MemoryOperations,
)
from tpoverlap.native import register

EPOCH, DUE, ENTRY, RECORD, DIGEST, MARK_ADDRESS, MARK_VALUE = range(7)
"""Registers of a tape that hold what `WordSheet.fill` takes, in that order."""
NUM_REGISTERS: Final = 7
"""Of those; a tape's others follow."""
_WORDS: Final = OPERATION_BYTES // 8
_ADDRESS, _VALUE = 1, 2  # 64-bit words of one operation

_Place = tuple[memoryview, int]
"""A batch in 64-bit words, and one of them."""


class WordSheet:
    """Collect operations and end batches; then, use after use, `fill` and submit them."""

    def __init__(self) -> None:
        self.fits = True
        """Whether the driver takes each batch in one call."""
        self._rows: list[tuple[int, int, int]] = []  # of the batch that is being collected: kind, address, flags
        self._fields: list[tuple[list[_Place], int]] = []
        self._sums: list[tuple[list[tuple[memoryview, int, int]], int, int]] = []
        # Places by what goes there, in the end plus a number.
        self._epochs: list[_Place] = []
        self._dues: list[_Place] = []
        self._records: list[_Place] = []
        self._digests: list[_Place] = []
        self._mark_addresses: list[_Place] = []
        self._mark_values: list[_Place] = []
        self._descriptors: list[tuple[memoryview, int, int]] = []
        self.patches: list[tuple[int, int]] = []
        """What `fill` does, for a tape: (address, operand) each."""

    # -- once ----------------------------------------------------------------------------------------------------

    def write_epoch(self, address: int) -> None:
        """Collect: the word at ``address`` becomes the epoch. An arrival flag, or a credit."""
        self._fields.append((self._epochs, self._row(WRITE_32, address, WRITE_ORDERED) + _VALUE))

    def wait_epoch(self, address: int) -> None:
        """Collect: wait until the word at ``address`` has reached the epoch. An arrival flag."""
        self._fields.append((self._epochs, self._row(WAIT_32, address, WAIT_GEQ) + _VALUE))

    def wait_due(self, address: int) -> None:
        """Collect: wait until the word at ``address`` has reached the epoch of the slot's last use. A credit."""
        self._fields.append((self._dues, self._row(WAIT_32, address, WAIT_GEQ) + _VALUE))

    def publish(self, ring: int) -> None:
        """Collect: the operation's descriptor goes to the ring at ``ring``, digest first."""
        for at, values in ((8, self._digests), (0, self._records)):
            self._descriptor(self._row(WRITE_64, 0, WRITE_ORDERED), ring + at, values)

    def expect(self, ring: int) -> None:
        """Collect: wait until the ring at ``ring`` has the same descriptor."""
        for at, values in ((0, self._records), (8, self._digests)):
            self._descriptor(self._row(WAIT_64, 0, WAIT_EQ), ring + at, values)

    def _descriptor(self, row: int, word: int, values: list[_Place]) -> None:
        self._sums.append((self._descriptors, row + _ADDRESS, word))
        self._fields.append((values, row + _VALUE))

    def mark_done(self) -> None:
        """Collect: the host's word."""
        row = self._row(WRITE_32, 0, WRITE_ORDERED)
        self._fields += [(self._mark_addresses, row + _ADDRESS), (self._mark_values, row + _VALUE)]

    def _row(self, kind: int, address: int, flags: int) -> int:
        self._rows.append((kind, address, flags))
        return _WORDS * (len(self._rows) - 1)

    def end_batch(self) -> MemoryOperations:
        """What was collected since the last one is a batch."""
        batch = MemoryOperations(len(self._rows))
        batch.count = len(self._rows)
        self.fits = self.fits and batch.count <= MAX_OPERATIONS
        for number, (kind, address, flags) in enumerate(self._rows):
            PACK.pack_into(batch.buffer, number * OPERATION_BYTES, kind, address, 0, flags, 0)
        words = memoryview(batch.buffer).cast("Q")
        registers = {
            id(places): number
            for places, number in (
                (self._epochs, EPOCH), (self._dues, DUE), (self._records, RECORD), (self._digests, DIGEST),
                (self._mark_addresses, MARK_ADDRESS), (self._mark_values, MARK_VALUE),
            )
        }  # fmt: skip
        for places, position in self._fields:
            places.append((words, position))
            self.patches.append((batch.address + 8 * position, register(registers[id(places)])))
        for sums, position, number in self._sums:
            sums.append((words, position, number))
            self.patches.append((batch.address + 8 * position, register(ENTRY, number)))
        self._rows, self._fields, self._sums = [], [], []
        return batch

    # -- each use ------------------------------------------------------------------------------------------------

    def fill(
        self,
        epoch: int,
        due: int,
        descriptor_offset: int,
        record: int,
        digest: int,
        mark_address: int,
        mark_value: int,
    ) -> None:
        """Write one use's numbers. ``epoch``, ``due``: mod 2**32. ``descriptor_offset``: in each rank's ring.

        Args:
            mark_address, mark_value: of the host's word.
        """
        for words, position in self._epochs:
            words[position] = epoch
        for words, position in self._dues:
            words[position] = due
        for words, position, ring in self._descriptors:
            words[position] = ring + descriptor_offset
        for words, position in self._records:
            words[position] = record
        for words, position in self._digests:
            words[position] = digest
        for words, position in self._mark_addresses:
            words[position] = mark_address
        for words, position in self._mark_values:
            words[position] = mark_value
