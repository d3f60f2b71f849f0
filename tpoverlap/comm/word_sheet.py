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

_WORDS: Final = OPERATION_BYTES // 8
_ADDRESS, _VALUE = 1, 2  # 64-bit words of one operation


class WordSheet:
    """Collect operations in the order of each batch, end each batch, `close`; then `fill` and submit, use after use."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._cuts: list[int] = [0]
        # Positions, in 64-bit words of the buffer, by what goes there.
        self._epochs: list[int] = []
        self._dues: list[int] = []
        self._records: list[int] = []
        self._digests: list[int] = []
        self._descriptors: list[tuple[int, int]] = []
        self._mark = 0

    # -- once ----------------------------------------------------------------------------------------------------

    def write_epoch(self, address: int) -> None:
        """Collect: the word at ``address`` becomes the epoch. An arrival flag, or a credit."""
        self._epochs.append(self._row(WRITE_32, address, WRITE_ORDERED) + _VALUE)

    def wait_epoch(self, address: int) -> None:
        """Collect: wait until the word at ``address`` has reached the epoch. An arrival flag."""
        self._epochs.append(self._row(WAIT_32, address, WAIT_GEQ) + _VALUE)

    def wait_due(self, address: int) -> None:
        """Collect: wait until the word at ``address`` has reached the epoch of the slot's last use. A credit."""
        self._dues.append(self._row(WAIT_32, address, WAIT_GEQ) + _VALUE)

    def publish(self, ring: int) -> None:
        """Collect: the operation's descriptor goes to the ring at ``ring``, digest first."""
        for at, values in ((8, self._digests), (0, self._records)):
            row = self._row(WRITE_64, 0, WRITE_ORDERED)
            self._descriptors.append((row + _ADDRESS, ring + at))
            values.append(row + _VALUE)

    def expect(self, ring: int) -> None:
        """Collect: wait until the ring at ``ring`` has the same descriptor."""
        for at, values in ((0, self._records), (8, self._digests)):
            row = self._row(WAIT_64, 0, WAIT_EQ)
            self._descriptors.append((row + _ADDRESS, ring + at))
            values.append(row + _VALUE)

    def mark_done(self) -> None:
        """Collect: the host's word. Once a sheet."""
        self._mark = self._row(WRITE_32, 0, WRITE_ORDERED)

    def _row(self, kind: int, address: int, flags: int) -> int:
        self._rows.append((kind, address, 0, flags, 0))
        return _WORDS * (len(self._rows) - 1)

    def end_batch(self) -> int:
        """What was collected since the last one is a batch: its number."""
        self._cuts.append(len(self._rows))
        return len(self._cuts) - 2

    @property
    def fits(self) -> bool:
        """Whether the driver takes each batch in one call."""
        return all(stop - start <= MAX_OPERATIONS for start, stop in zip(self._cuts, self._cuts[1:], strict=False))

    def close(self) -> list[MemoryOperations]:
        """The batches. They stay where they are."""
        buffer = memoryview(bytearray(len(self._rows) * OPERATION_BYTES))
        for number, row in enumerate(self._rows):
            PACK.pack_into(buffer, number * OPERATION_BYTES, *row)
        self._words = buffer.cast("Q")
        batches = []
        for start, stop in zip(self._cuts, self._cuts[1:], strict=False):
            batch = MemoryOperations(buffer[start * OPERATION_BYTES : stop * OPERATION_BYTES])
            batch.count = stop - start
            batches.append(batch)
        return batches

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
        words = self._words
        for position in self._epochs:
            words[position] = epoch
        for position in self._dues:
            words[position] = due
        for position, ring in self._descriptors:
            words[position] = ring + descriptor_offset
        for position in self._records:
            words[position] = record
        for position in self._digests:
            words[position] = digest
        words[self._mark + _ADDRESS] = mark_address
        words[self._mark + _VALUE] = mark_value
