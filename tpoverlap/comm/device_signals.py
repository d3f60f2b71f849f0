"""`Signals` on a device: stream memory operations, which occupy no multiprocessor.

A stream wait has no time-out. The watchdog's `release` is what bounds it: it makes the slots NaN, then writes values
that satisfy every wait, so that nothing hangs and nothing computed from missing data looks like a number.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from tpoverlap.comm.descriptor import Descriptor
from tpoverlap.comm.device_streams import DeviceStream, MarkEvent, device_stream
from tpoverlap.comm.diagnosis import Diagnosis
from tpoverlap.comm.epochs import MASK
from tpoverlap.comm.region import Region
from tpoverlap.comm.signals import Signals, SlotRef
from tpoverlap.comm.streams import Stream
from tpoverlap.errors import TpOverlapError
from tpoverlap.memory.base import Arena
from tpoverlap.memory.driver import DeviceDriver
from tpoverlap.memory.layout import ArenaLayout

_POISON_DISTANCE = 1 << 30
"""How far ahead of any epoch a poisoned flag is: still 'later' by cyclic comparison, whatever the epoch."""
_DONE_WORDS: Final = 4096
"""More than a host can be ahead of its device; a word that was used again still says that its earlier use is over."""


class SlotAddresses:
    """Where one slot of a region lies on every rank, and its words that concern this rank. Lists are indexed by rank.

    Attributes:
        data: the slot itself.
        arrival_out: this rank's first arrival flag, in the arena of each destination.
        arrival_in: each source's first arrival flag, here.
        credit_out: this rank's credit, in the arena of each source.
        credit_in: each destination's credit, here.
        rank: this one. depth: uses of the region until the slot is used again. size_bytes: of the slot.
    """

    __slots__ = ("arrival_in", "arrival_out", "credit_in", "credit_out", "data", "depth", "rank", "size_bytes")

    def __init__(self, region: Region, slot: int) -> None:
        arena, layout, index = region.arena, region.layout, region.index
        rank, ranks = arena.rank, range(arena.tp_size)
        self.rank, self.depth, self.size_bytes = rank, region.depth, region.slot_bytes
        own = arena.address(rank)
        self.data = [arena.address(r) + layout.slot_offset(index, slot) for r in ranks]
        self.arrival_out = [arena.address(r) + layout.arrival_offset(index, slot, rank, 0) for r in ranks]
        self.arrival_in = [own + layout.arrival_offset(index, slot, r, 0) for r in ranks]
        self.credit_out = [arena.address(r) + layout.credit_offset(index, slot, rank) for r in ranks]
        self.credit_in = [own + layout.credit_offset(index, slot, r) for r in ranks]


class DeviceSignals(Signals):
    """Signals between devices that map each other's memory. What it collects on a stream, the stream flushes.

    Args:
        arena, layout: the arena whose control words carry descriptors and aborts.
        driver: of this rank's device.
        timeout_s: named in messages; enforced by the watchdog.

    Attributes:
        peers: in ring order, this rank's next one first.
        descriptors_out: (peer, where this rank's ring of descriptors lies there), in that order.
        descriptors_in: by rank, where its ring lies here.
        words_behind: sequence number of an operation; the word stream goes on behind its last kernel.
    """

    def __init__(self, arena: Arena, layout: ArenaLayout, driver: DeviceDriver, timeout_s: float) -> None:
        self._arena = arena
        self._layout = layout
        self._driver = driver
        self._diagnosis = Diagnosis(arena.rank, arena.tp_size, timeout_s, self.peer_words, self.snapshot)
        self._arenas: list[tuple[Arena, ArenaLayout]] = [(arena, layout)]
        self._slots: dict[tuple[str, int], SlotAddresses] = {}
        # Pinned memory is made now: when it is needed, every call of the driver may be blocked.
        self._poison: dict[Arena, torch.Tensor] = {arena: driver.host_bytes(layout.control_bytes)}
        self._poisoned: set[Arena] = set()
        self._abort_word = driver.host_bytes(4)
        self._control = driver.host_bytes(layout.control_bytes)
        self._driver.export(arena.address(arena.rank), layout.total_bytes)
        self.peers = [(arena.rank + offset) % arena.tp_size for offset in range(1, arena.tp_size)]
        self.descriptors_out = [
            (peer, arena.address(peer) + layout.descriptor_offset(arena.rank, 0)) for peer in self.peers
        ]
        self.descriptors_in = [
            arena.address(arena.rank) + layout.descriptor_offset(source, 0) for source in range(arena.tp_size)
        ]
        self._descriptor_step = layout.descriptor_offset(0, 1)
        self._descriptor_ring = layout.descriptor_offset(1, 0) // self._descriptor_step
        self._done_words = driver.host_words(_DONE_WORDS)
        self._done = 0
        self.words_behind = 0

    def add_arena(self, arena: Arena, layout: ArenaLayout) -> None:
        self._arenas.append((arena, layout))
        self._poison[arena] = self._driver.host_bytes(layout.control_bytes)
        self._driver.export(arena.address(arena.rank), layout.total_bytes)

    def slot_addresses(self, region: Region, slot: int) -> SlotAddresses:
        """Those of ``slot``; made once."""
        key = (region.name, slot)
        found = self._slots.get(key)
        if found is None:
            found = self._slots[key] = SlotAddresses(region, slot)
        return found

    # -- for this process ----------------------------------------------------------------------------------------

    def next_mark(self, stream: int) -> MarkEvent:
        """The event of somebody who will write its word, once the stream with that handle has got here."""
        number = self._done = self._done + 1
        return MarkEvent(self._done_words, number % _DONE_WORDS, number & MASK, stream)

    def mark_done(self, stream: DeviceStream, writer: DeviceStream | None = None) -> MarkEvent:
        """Collect: tell this process that ``stream`` has got here; ``writer``, which follows it, may do that."""
        event = self.next_mark(stream.handle)
        (writer or stream).write32(event.address, event.value)
        return event

    # -- for kernels ---------------------------------------------------------------------------------------------

    def descriptor_addresses(self) -> tuple[list[int], int]:
        """Where this rank's ring of descriptors lies on each rank (0 for itself), and where that of rank 0 lies here.

        Rings of further ranks follow; one is ``DESCRIPTOR_RING * DESCRIPTOR_BYTES`` long.
        """
        out = [0] * self._arena.tp_size
        for peer, address in self.descriptors_out:
            out[peer] = address
        return out, self.descriptors_in[0]

    # -- on a stream ---------------------------------------------------------------------------------------------

    def publish_all(self, stream: DeviceStream, descriptor: Descriptor) -> None:
        """Collect: `publish` to every peer."""
        offset = descriptor.sequence % self._descriptor_ring * self._descriptor_step
        for _, address in self.descriptors_out:
            stream.write_pair(address + offset, descriptor.record, descriptor.digest)

    def publish(self, stream: Stream, peer: int, descriptor: Descriptor) -> None:
        offset = self._layout.descriptor_offset(self._arena.rank, descriptor.sequence)
        device_stream(stream).write_pair(self._arena.address(peer) + offset, descriptor.record, descriptor.digest)

    def expect(self, stream: Stream, peer: int, descriptor: Descriptor) -> None:
        self.expect_on(device_stream(stream), peer, descriptor)

    def expect_on(self, stream: DeviceStream, peer: int, descriptor: Descriptor) -> None:
        """`expect`."""
        offset = descriptor.sequence % self._descriptor_ring * self._descriptor_step
        stream.wait_pair(self.descriptors_in[peer] + offset, descriptor.record, descriptor.digest)

    def set_arrival(self, stream: Stream, destination: int, ref: SlotRef, piece: int) -> None:
        offset = ref.layout.arrival_offset(ref.region, ref.slot, self._arena.rank, piece)
        device_stream(stream).write32(ref.arena.address(destination) + offset, ref.epoch)

    def wait_arrival(self, stream: Stream, source: int, ref: SlotRef, piece: int, what: str) -> None:
        offset = ref.layout.arrival_offset(ref.region, ref.slot, source, piece)
        device_stream(stream).wait32(ref.arena.address(self._arena.rank) + offset, ref.epoch)

    def grant_credit(self, stream: Stream, source: int, ref: SlotRef) -> None:
        offset = ref.layout.credit_offset(ref.region, ref.slot, self._arena.rank)
        device_stream(stream).write32(ref.arena.address(source) + offset, ref.epoch)

    def wait_credit(self, stream: Stream, destination: int, ref: SlotRef, epoch: int, what: str) -> None:
        offset = ref.layout.credit_offset(ref.region, ref.slot, destination)
        device_stream(stream).wait32(ref.arena.address(self._arena.rank) + offset, epoch)

    # -- for the watchdog ----------------------------------------------------------------------------------------

    @property
    def diagnosis(self) -> Diagnosis:
        return self._diagnosis

    def snapshot(self) -> None:
        self._driver.read(self._arena.address(self._arena.rank), self._control)

    def peer_words(self, peer: int, sequence: int) -> tuple[int, int]:
        words = self._control.numpy().view(np.uint64)
        index = self._layout.descriptor_offset(peer, sequence) // 8
        return int(words[index]), int(words[index + 1])

    def abort_word(self, peer: int) -> int:
        return int(self._control.numpy().view(np.uint32)[self._layout.abort_offset(peer) // 4])

    def announce_abort(self, word: int) -> None:
        value, problem = self._abort_word, None
        value.numpy().view(np.uint32)[0] = word  # may exceed int32
        offset = self._layout.abort_offset(self._arena.rank)
        for peer in self.peers:
            try:
                self._driver.write(self._arena.address(peer) + offset, value)
            except TpOverlapError as error:
                problem = error  # the others can be told, or will be when the driver is free
        if problem is not None:
            raise problem

    def release(self, pending: list[Descriptor]) -> None:
        for arena, layout in self._arenas:
            address = arena.address(arena.rank)
            if arena not in self._poisoned:
                # 0xFF is NaN in bfloat16, float16, float32 and float8.
                self._driver.fill(address + layout.control_bytes, 0xFF, layout.total_bytes - layout.control_bytes)
                self._driver.read(address, self._poison[arena])
                self._advance(self._poison[arena].numpy(), layout)
                self._poisoned.add(arena)
            if arena is self._arena:
                self._forge_descriptors(self._poison[arena].numpy(), layout, pending)
            # Every time: a peer that still runs may have replaced a poisoned word by a genuine, smaller one.
            self._driver.write(address, self._poison[arena])

    @staticmethod
    def _advance(control: Any, layout: ArenaLayout) -> None:
        words = control.view(np.uint32)[layout.arrival_offset(0, 0, 0, 0) // 4 :]
        # Relative to each word's own value: every epoch waited for is within a few of it. Once, not every time: twice
        # the distance would no longer compare as later.
        words += np.uint32(_POISON_DISTANCE)

    def _forge_descriptors(self, control: Any, layout: ArenaLayout, pending: list[Descriptor]) -> None:
        words = control.view(np.uint64)
        for descriptor in pending:
            for peer in range(self._arena.tp_size):
                index = layout.descriptor_offset(peer, descriptor.sequence) // 8
                words[index], words[index + 1] = descriptor.record, descriptor.digest
