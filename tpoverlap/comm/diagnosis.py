"""From descriptors to the error a user can act on: a mismatch, a peer that gave up, or a peer that is late."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from enum import IntEnum

from tpoverlap.comm.descriptor import CLOSES, Descriptor, describe, operation_id, sequence_matches
from tpoverlap.errors import PeerTimeoutError, RankMismatchError, TpOverlapError
from tpoverlap.memory.layout import DESCRIPTOR_RING

PeerWords = Callable[[int, int], tuple[int, int]]
_SETTLE_S = 0.25


class AbortReason(IntEnum):
    """Why a rank gave up; travels in its abort word.

    The word: sequence number of its operation (16 bit), the rank it waited for in vain plus 1 (8 bit), reason (8 bit).
    """

    ERROR = 1
    MISMATCH = 2
    CLOSED = 3

    def word(self, sequence: int, culprit: int | None = None) -> int:
        """The 32-bit abort word for this reason at operation ``sequence``; ``culprit``: the rank that is to blame."""
        rank = culprit + 1 if culprit is not None and culprit < 0xFF else 0
        return ((sequence & 0xFFFF) << 16) | (rank << 8) | self

    @staticmethod
    def decode(word: int) -> tuple[AbortReason, int, int | None]:
        """(reason, sequence modulo 2**16, culprit) of an abort word."""
        rank = (word >> 8) & 0xFF
        return AbortReason(word & 0xFF), word >> 16, rank - 1 if rank else None


def blame(peer: int, message: str) -> PeerTimeoutError:
    """A PeerTimeoutError that remembers which rank it started with."""
    error = PeerTimeoutError(message)
    error.peer = peer
    return error


class Diagnosis:
    """This rank's recent operations, and messages that put the peers' beside them.

    Args:
        rank, tp_size: of the group.
        timeout_s: named in messages.
        peer_words: (peer, sequence) -> the (record, digest) that the peer last published for that ring entry.
        refresh: makes `peer_words` answer with what is there now.
    """

    def __init__(
        self,
        rank: int,
        tp_size: int,
        timeout_s: float,
        peer_words: PeerWords,
        refresh: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank = rank
        self.tp_size = tp_size
        self.timeout_s = timeout_s
        self._peer_words = peer_words
        self._refresh = refresh
        self._labels: dict[int, str] = {}
        self._possible: Callable[[], Iterable[str]] = tuple
        self._latest = 0
        self._refusal = (-1, "")
        self._history: list[Descriptor | None] = [None] * DESCRIPTOR_RING  # a ring: read by the watchdog's thread

    def remember(self, descriptor: Descriptor) -> None:
        """Note one of this rank's own operations."""
        self._labels[operation_id(descriptor.label)] = descriptor.label
        self._history[descriptor.sequence % DESCRIPTOR_RING] = descriptor
        self._latest = descriptor.sequence

    def know(self, label: str) -> None:
        """Make ``label`` printable when a peer names it."""
        self._labels[operation_id(label)] = label

    def know_possible(self, labels: Callable[[], Iterable[str]]) -> None:
        """Labels that peers may name; asked for only when ranks disagree."""
        self._possible = labels

    def own_words(self, sequence: int) -> tuple[int, int]:
        """This rank's (record, digest) for operation ``sequence``; (0, 0) if it has not got that far."""
        own = self._history[sequence % DESCRIPTOR_RING]
        if own is None or own.sequence != sequence:
            return 0, 0
        return own.record, own.digest

    def refused(self, error: BaseException) -> None:
        """This rank raised ``error`` instead of starting its next operation, for which peers may be about to wait."""
        self._refusal = (self._latest, f"{type(error).__name__}: {error}")  # text: an error holds its frames

    def own_error(self) -> str:
        """What this rank raised since its latest operation, as far as that is known; "" if nothing."""
        current = sys.exception()  # `close` in ``finally``, whose error hides this one
        if current is not None:
            return f"{type(current).__name__}: {current}"
        return self._refusal[1] if self._refusal[0] == self._latest else ""

    def abort_sequence(self, word: int) -> int:
        """The operation that an abort word is about: the one nearest to this rank's latest."""
        _, low_bits, _ = AbortReason.decode(word)
        return self._latest + (low_bits - self._latest + 0x8000) % 0x10000 - 0x8000

    def differs(self, descriptor: Descriptor) -> bool:
        """Whether some peer has published another operation, T or layout under this sequence number."""
        for peer in self._peers():
            record, digest = self._peer_words(peer, descriptor.sequence)
            if sequence_matches(record, descriptor.sequence) and (record, digest) != (
                descriptor.record,
                descriptor.digest,
            ):
                return True
        return False

    def mismatch(self, sequence: int) -> RankMismatchError:
        """Names every rank's value for operation number ``sequence``, as far as it has published one."""
        for label in self._possible():
            self._labels.setdefault(operation_id(label), label)
        values: list[tuple[int, int]] = []
        for rank in range(self.tp_size):
            if rank != self.rank:
                values.append(self._settled(rank, sequence))
            else:
                values.append(self.own_words(sequence))
        started = [v for v in values if sequence_matches(v[0], sequence)]
        only_counts = len({record for record, _ in started}) == 1
        parts = []
        for rank, (record, digest) in enumerate(values):
            text = describe(record, self._labels) if sequence_matches(record, sequence) else "not started"
            if only_counts and sequence_matches(record, sequence):
                text += f" and row counts, dtype and options of digest {digest & 0xFFFFFF:06x}"
            parts.append(f"rank {rank}: {text}")
        said = f"ranks disagree on operation number {sequence}: {'; '.join(parts)}. "
        if any(part.endswith(CLOSES) for part in parts):
            return RankMismatchError(
                f"{said}A rank that closes while others go on has usually raised an error before, which is in its own "
                "log, or it made fewer calls"
            )
        return RankMismatchError(
            f"{said}"
            "Every rank must call the same operations in the same order, with the same T, row counts, dtype and "
            "options (FP8 recipes and delayed scaling's history; on the CPU tokens, targets and cu_seqlens, too). "
            "Without an active shape T is inferred from a rank's own rows: call set_active_shape for each microbatch"
        )

    def gave_up(self, peer: int, word: int, what: str) -> TpOverlapError:
        """The error for an abort word of ``peer``, seen while waiting for ``what``."""
        reason, _, culprit = AbortReason.decode(word)
        if reason is AbortReason.MISMATCH:
            return self.mismatch(self.abort_sequence(word))
        if culprit == self.rank:
            return blame(
                culprit,
                f"rank {peer} gave up waiting for this rank, {self.rank}: {what}. "
                f"Rank {self.rank} is slower than timeout_s={self.timeout_s:g}, or it lost the connection",
            )
        if culprit is not None and culprit != peer:
            return blame(
                culprit,
                f"rank {peer} gave up because of rank {culprit} while rank {self.rank} waited: {what}. "
                f"Rank {culprit} raised an error, closed its manager, died or hangs; its own log has the cause",
            )
        did = "closed its manager" if reason is AbortReason.CLOSED else "raised an error and gave up"
        return blame(
            peer,
            f"rank {peer} {did} while rank {self.rank} waited for it: {what}. "
            f"The cause is the first error printed by rank {peer}",
        )

    def late(self, peer: int, waited_s: float, what: str) -> PeerTimeoutError:
        """The error for a peer that did not answer in time."""
        return blame(
            peer,
            f"rank {self.rank} waited {waited_s:.1f} s for rank {peer}: {what}. "
            f"Rank {peer} is stuck, dead, slower than timeout_s={self.timeout_s:g}, or raised before it began: see its "
            "own log",
        )

    def missing_peers(self, sequence: int) -> list[int]:
        """Peers that have not started operation ``sequence``."""
        return [p for p in self._peers() if not sequence_matches(self._peer_words(p, sequence)[0], sequence)]

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.tp_size) if rank != self.rank]

    def _settled(self, peer: int, sequence: int) -> tuple[int, int]:
        # A peer may be microseconds behind; give it a moment so that the message names every rank's value.
        deadline = time.monotonic() + _SETTLE_S
        while True:
            words = self._peer_words(peer, sequence)
            if sequence_matches(words[0], sequence) or time.monotonic() > deadline:
                return words
            time.sleep(0.01)
            self._refresh()
