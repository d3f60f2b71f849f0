"""A region at run time: which slot comes next, and what must happen before it is used again."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tpoverlap.comm.signals import SlotRef
from tpoverlap.comm.streams import Event
from tpoverlap.memory.base import Arena
from tpoverlap.memory.layout import ArenaLayout, require_fits


@dataclass
class Region:
    """One named region of an arena. Operations use its slots in turn; the ``u``-th use has epoch ``u``.

    Attributes:
        uses: operations that have claimed a slot so far; the same on every rank.
        last_reader: event after the last local reader of each slot.
        held: epochs whose slot was handed out by ``get_buffer``: their credit waits for the next-but-one operation.
    """

    name: str
    arena: Arena
    layout: ArenaLayout
    index: int
    uses: int = 0
    last_reader: dict[int, Event] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)

    @property
    def slot_bytes(self) -> int:
        """Size of one slot."""
        return self.layout.regions[self.index].slot_bytes

    @property
    def depth(self) -> int:
        """Slots that are used in turn."""
        return self.layout.regions[self.index].depth

    def ref(self, epoch: int) -> SlotRef:
        """The slot that use number ``epoch`` has."""
        return SlotRef(self.arena, self.layout, self.index, epoch % self.depth, epoch)

    def view(
        self, rank: int, epoch: int, first_element: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Typed view of part of a slot of ``rank``.

        Raises:
            CapacityError: it would end outside the slot.
        """
        size = dtype.itemsize
        for length in shape:
            size *= length
        require_fits(first_element * dtype.itemsize + size, self.slot_bytes, f"{list(shape)} of {dtype}")
        offset = self.layout.slot_offset(self.index, epoch % self.depth) + first_element * dtype.itemsize
        return self.arena.view(rank, offset, shape, dtype)
