"""`Signals` on the CPU: words in shared memory, waits that spin briefly and then back off."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tpoverlap.comm.descriptor import Descriptor, sequence_matches
from tpoverlap.comm.diagnosis import Diagnosis
from tpoverlap.comm.epochs import reached, wrap32
from tpoverlap.comm.fault import Fault
from tpoverlap.comm.signals import Signals, SlotRef
from tpoverlap.comm.streams import Stream
from tpoverlap.memory.base import CpuArena
from tpoverlap.memory.layout import ArenaLayout

_SPINS = 40
_YIELDS = 40
_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3


class HostSignals(Signals):
    """Signals between processes that share host memory.

    Args:
        arena, layout: the arena whose control words carry descriptors and aborts.
        fault: where a wait looks whether it is still worth waiting.
    """

    def __init__(self, arena: CpuArena, layout: ArenaLayout, fault: Fault, timeout_s: float) -> None:
        self._arena = arena
        self._layout = layout
        self._fault = fault
        self._diagnosis = Diagnosis(arena.rank, arena.tp_size, timeout_s, self.peer_words)
        self._fence_lock = threading.Lock()

    def publish(self, stream: Stream, peer: int, descriptor: Descriptor) -> None:
        self._publish(peer, descriptor.sequence, descriptor.record, descriptor.digest)

    def _publish(self, peer: int, sequence: int, record: int, digest: int) -> None:
        words = self._arena.words64(peer)
        index = self._layout.descriptor_offset(self._arena.rank, sequence) // 8
        words[index + 1] = digest
        self._fence()
        words[index] = record  # last: it carries the sequence number that waiters look for

    def expect(self, stream: Stream, peer: int, descriptor: Descriptor) -> None:
        words = self._arena.words64(self._arena.rank)
        index = self._layout.descriptor_offset(peer, descriptor.sequence) // 8
        self._spin(
            lambda: sequence_matches(int(words[index]), descriptor.sequence),
            peer,
            f"{descriptor.label} (T={descriptor.num_tokens}) to start it",
        )
        if int(words[index]) != descriptor.record or int(words[index + 1]) != descriptor.digest:
            raise self._diagnosis.mismatch(descriptor.sequence)

    def set_arrival(self, stream: Stream, destination: int, ref: SlotRef, piece: int) -> None:
        self._fence()
        offset = ref.layout.arrival_offset(ref.region, ref.slot, self._arena.rank, piece)
        _cpu(ref).words32(destination)[offset // 4] = wrap32(ref.epoch)

    def wait_arrival(self, stream: Stream, source: int, ref: SlotRef, piece: int, what: str) -> None:
        offset = ref.layout.arrival_offset(ref.region, ref.slot, source, piece)
        self._wait_word(ref, offset, ref.epoch, source, what)
        self._fence()

    def grant_credit(self, stream: Stream, source: int, ref: SlotRef) -> None:
        self._fence()
        offset = ref.layout.credit_offset(ref.region, ref.slot, self._arena.rank)
        _cpu(ref).words32(source)[offset // 4] = wrap32(ref.epoch)

    def wait_credit(self, stream: Stream, destination: int, ref: SlotRef, epoch: int, what: str) -> None:
        offset = ref.layout.credit_offset(ref.region, ref.slot, destination)
        self._wait_word(ref, offset, epoch, destination, what)

    def _wait_word(self, ref: SlotRef, offset: int, epoch: int, peer: int, what: str) -> None:
        words = _cpu(ref).words32(self._arena.rank)
        index = offset // 4
        self._spin(lambda: reached(int(words[index]), epoch), peer, what)

    def _spin(self, is_reached: Callable[[], bool], peer: int, what: str) -> None:
        for _ in range(_SPINS):
            if is_reached():
                return
        started, sleep_s, turns = time.monotonic(), _FIRST_SLEEP_S, 0
        while not is_reached():
            self._fault.check()
            abort_word = self.abort_word(peer)
            if abort_word and not is_reached():
                raise self._diagnosis.gave_up(peer, abort_word, what)
            waited_s = time.monotonic() - started
            if waited_s > self._diagnosis.timeout_s:
                raise self._diagnosis.late(peer, waited_s, what)
            turns += 1
            if turns <= _YIELDS:
                time.sleep(0)
            else:
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)

    def _fence(self) -> None:
        # Python has no memory fence. A lock's acquire and release, twice, orders earlier stores before later ones on
        # weakly ordered CPUs too (release of the first pair, then acquire of the second); on x86 it is not needed.
        with self._fence_lock:
            pass
        with self._fence_lock:
            pass

    # -- for the watchdog ----------------------------------------------------------------------------------------

    @property
    def diagnosis(self) -> Diagnosis:
        return self._diagnosis

    def snapshot(self) -> None:
        """Nothing to fetch: the words are in this process's memory."""

    def peer_words(self, peer: int, sequence: int) -> tuple[int, int]:
        words = self._arena.words64(self._arena.rank)
        index = self._layout.descriptor_offset(peer, sequence) // 8
        return int(words[index]), int(words[index + 1])

    def abort_word(self, peer: int) -> int:
        return int(self._arena.words32(self._arena.rank)[self._layout.abort_offset(peer) // 4])

    def announce_abort(self, word: int) -> None:
        index = self._layout.abort_offset(self._arena.rank) // 4
        sequence = self._diagnosis.abort_sequence(word)
        record, digest = self._diagnosis.own_words(sequence)
        for peer in range(self._arena.tp_size):
            if peer != self._arena.rank:
                if record:  # the comm thread may not have got round to it, and skips it now; peers want to name it
                    self._publish(peer, sequence, record, digest)
                    self._fence()
                self._arena.words32(peer)[index] = word

    def release(self, pending: list[Descriptor]) -> None:
        """Nothing to write: waits look at the fault themselves, and raise instead of returning data."""


def _cpu(ref: SlotRef) -> CpuArena:
    assert isinstance(ref.arena, CpuArena), f"host signals on {ref.arena!r}"
    return ref.arena
