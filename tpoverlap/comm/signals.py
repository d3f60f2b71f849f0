"""The only synchronisation between ranks that map each other's memory: descriptors, arrival flags, credits, aborts.

Who writes what, for an operation that uses slot ``s`` of a region for the ``u``-th time (its *epoch*):

============  =====================  ==========================  ==================================================
word          lies in the arena of   written by                  when, and what it means
============  =====================  ==========================  ==================================================
descriptor    every peer             the rank it describes       operation starts, before any flag of it
arrival       the destination        the source                  after its data; "piece is there for epoch u"
credit        the source             the destination             after its last reader; "slot may be overwritten"
abort         every peer             the rank that gave up       it raised, timed out or closed after an error
============  =====================  ==========================  ==================================================

All are monotonic epochs (or sequence numbers) that are never reset. A source may overwrite a slot for epoch u once
the credit for u - depth came back. That is *not* a barrier: a peer can be up to ``depth`` operations of a region
ahead, and an arrival from one source says nothing about another. `docs/protocol.md` explains, and
`tests/protocol` model-checks, this protocol.

Methods act *on* a stream and must be called inside ``stream.run``: on the CPU they block the calling thread, on the
GPU they enqueue a stream memory operation, which occupies no multiprocessor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from tpoverlap.comm.descriptor import Descriptor
from tpoverlap.comm.diagnosis import Diagnosis
from tpoverlap.comm.streams import Stream
from tpoverlap.memory.base import Arena
from tpoverlap.memory.layout import ArenaLayout


class SlotRef(NamedTuple):
    """One use of a slot: where its words are and which epoch they must reach."""

    arena: Arena
    layout: ArenaLayout
    region: int
    slot: int
    epoch: int


class Signals(ABC):
    """Writes and awaits the words above. One object a manager."""

    @abstractmethod
    def publish(self, stream: Stream, peer: int, descriptor: Descriptor) -> None:
        """Tell ``peer`` which operation this rank has started."""

    @abstractmethod
    def expect(self, stream: Stream, peer: int, descriptor: Descriptor) -> None:
        """Wait until ``peer`` has started the operation with this sequence number, and compare.

        Raises:
            RankMismatchError: its descriptor differs (on the GPU the stream stalls instead and the watchdog raises).
            PeerTimeoutError: it did not come within the time-out (on the GPU: raised by the watchdog).
        """

    @abstractmethod
    def set_arrival(self, stream: Stream, destination: int, ref: SlotRef, piece: int) -> None:
        """After data: mark ``piece`` as arrived in the slot of ``destination``, with release order."""

    @abstractmethod
    def wait_arrival(self, stream: Stream, source: int, ref: SlotRef, piece: int, what: str) -> None:
        """Before reading: wait until ``piece`` from ``source`` is there, with acquire order."""

    @abstractmethod
    def grant_credit(self, stream: Stream, source: int, ref: SlotRef) -> None:
        """After the last reader: tell ``source`` that it may overwrite this rank's slot."""

    @abstractmethod
    def wait_credit(self, stream: Stream, destination: int, ref: SlotRef, epoch: int, what: str) -> None:
        """Before overwriting the slot of ``destination``: wait for its credit for ``epoch``."""

    def add_arena(self, arena: Arena, layout: ArenaLayout) -> None:  # noqa: B027  (not every kind cares)
        """A further arena has words that `release` must cover."""

    # -- for the watchdog: host-side, never on a stream ----------------------------------------------------------

    @property
    @abstractmethod
    def diagnosis(self) -> Diagnosis:
        """This rank's recent operations beside the peers'."""

    @abstractmethod
    def snapshot(self) -> None:
        """Refresh what `peer_words` and `abort_word` answer from."""

    @abstractmethod
    def peer_words(self, peer: int, sequence: int) -> tuple[int, int]:
        """(record, digest) that ``peer`` last published in the ring entry of ``sequence``."""

    @abstractmethod
    def abort_word(self, peer: int) -> int:
        """The abort word of ``peer`` (see `AbortReason`); 0 while it is fine."""

    @abstractmethod
    def announce_abort(self, word: int) -> None:
        """Tell every peer that this rank has given up, and why."""

    @abstractmethod
    def release(self, pending: list[Descriptor]) -> None:
        """Let every local waiter go after the fault was stored; what it would have read is made NaN first.

        Called again while operations are still in flight: a peer's late flag may have replaced a poisoned one.
        """

    def close(self) -> None:  # noqa: B027  (not every kind has something to free)
        """Free what only the watchdog used. After the waiters were released."""
