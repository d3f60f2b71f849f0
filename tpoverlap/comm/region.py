"""A region at run time: which slot comes next, and what must happen before it is used again."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from tpoverlap.comm.signals import SlotRef
from tpoverlap.comm.streams import Event
from tpoverlap.memory.base import Arena
from tpoverlap.memory.layout import ArenaLayout, require_fits

_VIEWS = 64
"""Views that are kept, the latest ones: more than the layers of a microbatch use."""


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
    _slots: dict[tuple[int, int, torch.dtype], tuple[torch.Tensor, int]] = field(default_factory=dict)
    _views: dict[tuple[int, int, int, tuple[int, ...], torch.dtype], torch.Tensor] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.slot_bytes = self.layout.regions[self.index].slot_bytes
        """Size of one slot."""
        self.depth = self.layout.regions[self.index].depth
        """Slots that are used in turn."""

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
        key = (rank, epoch % self.depth, first_element, shape, dtype)
        found = self._views.get(key)
        return self._new_view(*key) if found is None else found

    def _new_view(
        self, rank: int, slot: int, first_element: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        size = dtype.itemsize
        for length in shape:
            size *= length
        if first_element * dtype.itemsize + size > self.slot_bytes:
            require_fits(first_element * dtype.itemsize + size, self.slot_bytes, f"{list(shape)} of {dtype}")
        whole, offset = self._slots.get((rank, slot, dtype)) or self._whole_slot(rank, slot, dtype)
        strides, stride = [], 1
        for length in reversed(shape):
            strides.append(stride)
            stride *= length
        with torch.inference_mode(False):  # it outlives the caller's mode
            view = whole.as_strided(shape, strides[::-1], offset + first_element)
        with self._lock:  # the comm thread makes views for what it sends while the caller makes others
            if len(self._views) >= _VIEWS:
                del self._views[next(iter(self._views))]
            self._views[rank, slot, first_element, shape, dtype] = view
        return view

    def _whole_slot(self, rank: int, slot: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """A slot as a flat tensor, and its first element in the arena: what views are cut from. Made once."""
        offset = self.layout.slot_offset(self.index, slot)
        with torch.inference_mode(False):  # the first call may be in that mode, and later ones write outside it
            whole = self.arena.view(rank, offset, (self.slot_bytes // dtype.itemsize,), dtype)
        found = self._slots[rank, slot, dtype] = whole, int(whole.storage_offset())
        return found

    def forget_views(self) -> None:
        """The arena is about to be closed."""
        self._slots.clear()
        self._views.clear()
