"""`Signals` on NVIDIA GPUs: stream memory operations, which occupy no multiprocessor.

A stream wait has no time-out. The watchdog's `release` is what bounds it: it makes the slots NaN, then writes values
that satisfy every wait, so that nothing hangs and nothing computed from missing data looks like a number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cuda.bindings import driver

from tpoverlap.comm.cuda_side_channel import SideChannel
from tpoverlap.comm.cuda_streams import CudaStream
from tpoverlap.comm.descriptor import Descriptor
from tpoverlap.comm.diagnosis import Diagnosis
from tpoverlap.comm.epochs import wrap32
from tpoverlap.comm.signals import Signals, SlotRef
from tpoverlap.comm.streams import Stream
from tpoverlap.errors import BackendUnavailableError
from tpoverlap.memory.base import Arena
from tpoverlap.memory.cuda import CudaArena
from tpoverlap.memory.layout import ArenaLayout

_WAIT_GEQ = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
_WAIT_EQ = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
_WRITE_ORDERED = int(driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)  # fences at system scope first
_POISON_DISTANCE = 1 << 30
"""How far ahead of any epoch a poisoned flag is: still 'later' by cyclic comparison, whatever the epoch."""


class CudaSignals(Signals):
    """Signals between GPUs that map each other's memory.

    Args:
        arena, layout: the arena whose control words carry descriptors and aborts.
        device: this rank's GPU.
        timeout_s: named in messages; enforced by the watchdog.
    """

    def __init__(self, arena: CudaArena, layout: ArenaLayout, device: torch.device, timeout_s: float) -> None:
        self._arena = arena
        self._layout = layout
        self._diagnosis = Diagnosis(arena.rank, arena.tp_size, timeout_s, self.peer_words, self.snapshot)
        self._arenas: list[tuple[CudaArena, ArenaLayout]] = [(arena, layout)]
        self._poison: dict[CudaArena, torch.Tensor] = {}
        self._side = SideChannel(device)
        self._control = torch.zeros(layout.control_bytes, dtype=torch.uint8, pin_memory=True)

    def add_arena(self, arena: Arena, layout: ArenaLayout) -> None:
        assert isinstance(arena, CudaArena), f"CUDA signals on {arena!r}"
        self._arenas.append((arena, layout))

    # -- on a stream ---------------------------------------------------------------------------------------------

    def publish(self, stream: Stream, peer: int, descriptor: Descriptor) -> None:
        address = self._arena.address(peer) + self._layout.descriptor_offset(self._arena.rank, descriptor.sequence)
        handle = _handle(stream)
        _check(driver.cuStreamWriteValue64(handle, address + 8, descriptor.digest, _WRITE_ORDERED))
        _check(driver.cuStreamWriteValue64(handle, address, descriptor.record, _WRITE_ORDERED))

    def expect(self, stream: Stream, peer: int, descriptor: Descriptor) -> None:
        address = self._arena.address(self._arena.rank) + self._layout.descriptor_offset(peer, descriptor.sequence)
        handle = _handle(stream)
        _check(driver.cuStreamWaitValue64(handle, address, descriptor.record, _WAIT_EQ))
        _check(driver.cuStreamWaitValue64(handle, address + 8, descriptor.digest, _WAIT_EQ))

    def set_arrival(self, stream: Stream, destination: int, ref: SlotRef, piece: int) -> None:
        offset = ref.layout.arrival_offset(ref.region, ref.slot, self._arena.rank, piece)
        _write(stream, _cuda(ref).address(destination) + offset, ref.epoch)

    def wait_arrival(self, stream: Stream, source: int, ref: SlotRef, piece: int, what: str) -> None:
        offset = ref.layout.arrival_offset(ref.region, ref.slot, source, piece)
        _wait(stream, _cuda(ref).address(self._arena.rank) + offset, ref.epoch)

    def grant_credit(self, stream: Stream, source: int, ref: SlotRef) -> None:
        offset = ref.layout.credit_offset(ref.region, ref.slot, self._arena.rank)
        _write(stream, _cuda(ref).address(source) + offset, ref.epoch)

    def wait_credit(self, stream: Stream, destination: int, ref: SlotRef, epoch: int, what: str) -> None:
        offset = ref.layout.credit_offset(ref.region, ref.slot, destination)
        _wait(stream, _cuda(ref).address(self._arena.rank) + offset, epoch)

    # -- for the watchdog ----------------------------------------------------------------------------------------

    @property
    def diagnosis(self) -> Diagnosis:
        return self._diagnosis

    def snapshot(self) -> None:
        self._side.read(self._arena.address(self._arena.rank), self._control)

    def peer_words(self, peer: int, sequence: int) -> tuple[int, int]:
        words = self._control.numpy().view(np.uint64)
        index = self._layout.descriptor_offset(peer, sequence) // 8
        return int(words[index]), int(words[index + 1])

    def abort_word(self, peer: int) -> int:
        return int(self._control.numpy().view(np.uint32)[self._layout.abort_offset(peer) // 4])

    def announce_abort(self, word: int) -> None:
        value = torch.from_numpy(np.array([word], dtype=np.uint32).view(np.uint8)).pin_memory()  # may exceed int32
        offset = self._layout.abort_offset(self._arena.rank)
        for peer in range(self._arena.tp_size):
            if peer != self._arena.rank:
                self._side.write(self._arena.address(peer) + offset, value)

    def release(self, pending: list[Descriptor]) -> None:
        for arena, layout in self._arenas:
            address = arena.address(arena.rank)
            if arena not in self._poison:
                # 0xFF is NaN in bfloat16, float16, float32 and float8.
                self._side.fill(address + layout.control_bytes, 0xFF, layout.total_bytes - layout.control_bytes)
                self._poison[arena] = torch.empty(layout.control_bytes, dtype=torch.uint8, pin_memory=True)
                self._side.read(address, self._poison[arena])
                self._advance(self._poison[arena].numpy(), layout)
            if arena is self._arena:
                self._forge_descriptors(self._poison[arena].numpy(), layout, pending)
            # Every time: a peer that still runs may have replaced a poisoned word by a genuine, smaller one.
            self._side.write(address, self._poison[arena])

    def close(self) -> None:
        self._side.close()

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


def _handle(stream: Stream) -> Any:
    assert isinstance(stream, CudaStream), f"CUDA signals on {stream!r}"
    return stream.handle


def _write(stream: Stream, address: int, epoch: int) -> None:
    _check(driver.cuStreamWriteValue32(_handle(stream), address, wrap32(epoch), _WRITE_ORDERED))


def _wait(stream: Stream, address: int, epoch: int) -> None:
    _check(driver.cuStreamWaitValue32(_handle(stream), address, wrap32(epoch), _WAIT_GEQ))


def _check(result: tuple[Any, ...]) -> None:
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise BackendUnavailableError(f"a stream memory operation failed: {result[0]}; run `tpoverlap doctor`")


def _cuda(ref: SlotRef) -> CudaArena:
    assert isinstance(ref.arena, CudaArena), f"CUDA signals on {ref.arena!r}"
    return ref.arena
