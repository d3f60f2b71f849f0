"""Where everything lies inside an arena. Byte arithmetic only: no device, no torch, Python integers (no 2 GiB limit).

Every rank's arena has the same layout::

    offset 0                                                   data_offset
    | descriptors | aborts | arrival flags | credits | padding | region 0: slots 0, 1 | region 1: slots 0, 1 | ...

`docs/protocol.md` says who writes which word, and when.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tpoverlap.errors import CapacityError

ALIGNMENT_BYTES = 256
WORD_BYTES = 4
DESCRIPTOR_BYTES = 16
DESCRIPTOR_RING = 64
"""Descriptors of one source are kept for this many operations; credits bound how far a source can run ahead."""
MAX_PIECES = 64
"""Arrival flags a source has in one slot: the most pieces (or pipeline splits) of one operation."""
SLOT_DEPTH = 2


def align_up(size_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """The smallest multiple of ``alignment_bytes`` that is at least ``size_bytes``."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


@dataclass(frozen=True)
class RegionSpec:
    """A named region: ``depth`` slots of ``slot_bytes`` each, used in turn by successive operations."""

    name: str
    slot_bytes: int
    depth: int = SLOT_DEPTH


@dataclass(frozen=True)
class ArenaLayout:
    """Offsets, in bytes from the start of a rank's arena, of every word and every slot."""

    tp_size: int
    regions: tuple[RegionSpec, ...]

    # -- control words -------------------------------------------------------------------------------------------

    def descriptor_offset(self, source: int, sequence: int) -> int:
        """Two 64-bit words that rank ``source`` wrote about its operation number ``sequence``."""
        return (source * DESCRIPTOR_RING + sequence % DESCRIPTOR_RING) * DESCRIPTOR_BYTES

    def abort_offset(self, source: int) -> int:
        """One 32-bit word that rank ``source`` sets when it gives up."""
        return self._aborts_offset + source * WORD_BYTES

    def arrival_offset(self, region: int, slot: int, source: int, piece: int) -> int:
        """One 32-bit word: the epoch of the last data that ``source`` wrote for ``piece`` into this slot."""
        assert 0 <= piece < MAX_PIECES, f"piece {piece} has no flag, a slot has {MAX_PIECES}"
        return self._arrivals_offset + (self._slot_number(region, slot, source) * MAX_PIECES + piece) * WORD_BYTES

    def credit_offset(self, region: int, slot: int, consumer: int) -> int:
        """One 32-bit word: the epoch that ``consumer`` has finished reading in *its* copy of this slot."""
        return self._credits_offset + self._slot_number(region, slot, consumer) * WORD_BYTES

    def _slot_number(self, region: int, slot: int, rank: int) -> int:
        return (region * SLOT_DEPTH + slot) * self.tp_size + rank

    @cached_property
    def _aborts_offset(self) -> int:
        return self.tp_size * DESCRIPTOR_RING * DESCRIPTOR_BYTES

    @cached_property
    def _arrivals_offset(self) -> int:
        return align_up(self._aborts_offset + self.tp_size * WORD_BYTES)

    @cached_property
    def _credits_offset(self) -> int:
        count = len(self.regions) * SLOT_DEPTH * self.tp_size * MAX_PIECES
        return align_up(self._arrivals_offset + count * WORD_BYTES)

    @cached_property
    def control_bytes(self) -> int:
        """Size of everything before the first region."""
        return align_up(self._credits_offset + len(self.regions) * SLOT_DEPTH * self.tp_size * WORD_BYTES)

    # -- data ----------------------------------------------------------------------------------------------------

    def slot_offset(self, region: int, slot: int) -> int:
        """First byte of a slot."""
        spec = self.regions[region]
        assert 0 <= slot < spec.depth, f"region {spec.name} has slots 0..{spec.depth - 1}, not {slot}"
        return self._region_offsets[region] + slot * align_up(spec.slot_bytes)

    @cached_property
    def _region_offsets(self) -> tuple[int, ...]:
        offsets, offset = [], self.control_bytes
        for spec in self.regions:
            offsets.append(offset)
            offset += spec.depth * align_up(spec.slot_bytes)
        return (*offsets, offset)

    @cached_property
    def total_bytes(self) -> int:
        """Size of one rank's arena."""
        return self._region_offsets[-1]


def gather_slot_bytes(capacity_tokens: int, width: int, itemsize_bytes: int) -> int:
    """An all-gather slot holds the whole [C, H] activation."""
    return capacity_tokens * width * itemsize_bytes


def scatter_slot_bytes(max_rows_per_rank: int, width: int, itemsize_bytes: int, tp_size: int) -> int:
    """A reduce-scatter slot holds one [T_r, H] block from each of the R - 1 peers; own rows never enter it."""
    return (tp_size - 1) * max_rows_per_rank * width * itemsize_bytes


def require_fits(needed_bytes: int, slot_bytes: int, what: str) -> None:
    """Raise CapacityError, with both sizes, when ``what`` does not fit its slot."""
    if needed_bytes > slot_bytes:
        raise CapacityError(
            f"{what} needs {needed_bytes} bytes but its slot holds {slot_bytes}; "
            "register a larger capacity (capacity_shape, max_rows_per_rank or mgr.register(..., width, max_tokens))"
        )
