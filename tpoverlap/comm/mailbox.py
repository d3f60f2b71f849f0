"""Headers: how ranks that share no memory tell each other which operation they are at."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from tpoverlap.comm.descriptor import Descriptor, sequence_matches
from tpoverlap.comm.diagnosis import Diagnosis, blame
from tpoverlap.comm.gloo_link import AbortBoard, GlooLink
from tpoverlap.memory.layout import DESCRIPTOR_RING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SIGN = 1 << 63
_HEADER_TAG = 1 << 20
SEQUENCES_WITH_OWN_TAG = 8192
_SETTLE_S = 0.3


class Mailbox:
    """Sends, receives and compares headers; remembers the peers' for `Diagnosis`.

    Args:
        group: the caller's group (moves data between GPUs).
        link: moves headers, and data between CPUs.
        board: where a peer's end is found out.
        timeout_s: bound of every wait.
    """

    def __init__(self, group: ProcessGroup, link: GlooLink, board: AbortBoard, timeout_s: float) -> None:
        self.group = group
        self.link = link
        self.timeout = timedelta(seconds=timeout_s)
        self.rank = group.rank()
        self.peers = [(self.rank + offset) % group.size() for offset in range(1, group.size())]
        self._board = board
        self._words: dict[tuple[int, int], tuple[int, int]] = {}
        self._incoming: dict[int, torch.Tensor] = {}
        self.diagnosis = Diagnosis(self.rank, group.size(), timeout_s, self._peer_words)

    def _peer_words(self, peer: int, sequence: int) -> tuple[int, int]:
        words = self._words.get((peer, sequence % DESCRIPTOR_RING), (0, 0))
        if not sequence_matches(words[0], sequence) and peer in self._incoming:
            words = _unpack(self._incoming[peer])  # arrived, but its turn to be waited for has not come
        if not sequence_matches(words[0], sequence):  # a peer that gave up sends no header any more
            words = self._board.look(peer)[1:]
        return words

    def send_headers(self, descriptor: Descriptor) -> list[Any]:
        """Start sending ``descriptor`` to every peer; wait for the returned works before leaving the operation."""
        words = _pack(descriptor.record, descriptor.digest)
        return [self.link.send(words, peer, _header_tag(descriptor)) for peer in self.peers]

    def compare_headers(self, descriptor: Descriptor) -> None:
        """Receive every peer's header and compare.

        Raises:
            RankMismatchError: a header differs. PeerTimeoutError: one did not come.
        """
        incoming = {peer: torch.zeros(3, dtype=torch.int64) for peer in self.peers}
        works = {peer: self.link.receive(incoming[peer], peer, _header_tag(descriptor)) for peer in self.peers}
        self._incoming = incoming
        for peer in self.peers:
            self.finish(works[peer], peer, f"{descriptor.label} (T={descriptor.num_tokens}) to start it")
            self._words[peer, descriptor.sequence % DESCRIPTOR_RING] = _unpack(incoming[peer])
        if self.diagnosis.differs(descriptor):
            raise self.diagnosis.mismatch(descriptor.sequence)

    def finish(self, work: Any, peer: int, what: str) -> None:
        """Wait for one message, bounded by the time-out.

        Raises:
            RankMismatchError, PeerTimeoutError: it did not come, or the peer gave up.
        """
        started = time.monotonic()
        try:
            work.wait(self.timeout)
        except RuntimeError as error:
            waited_s = time.monotonic() - started
            if waited_s >= self.timeout.total_seconds():
                raise self.diagnosis.late(peer, waited_s, what) from error
            # The connection broke. Give the reason a moment to arrive: the peer's abort word, or on this rank the
            # error of the thread whose time-out made Gloo close all connections.
            deadline = time.monotonic() + _SETTLE_S
            while time.monotonic() < deadline:
                word = self._board.look(peer)[0]
                if word:
                    raise self.diagnosis.gave_up(peer, word, what) from error
                time.sleep(0.01)
            raise blame(
                peer,
                f"rank {self.rank} lost rank {peer} while it waited for {what}: rank {peer} died or closed the "
                f"connection ({error})",
            ) from error

    def announce_abort(self, word: int) -> None:
        """Tell the peers that this rank gave up, why, and what its operation was."""
        self._board.announce(word, *self.diagnosis.own_words(self.diagnosis.abort_sequence(word)))


def _pack(record: int, digest: int) -> torch.Tensor:
    """A header: both words and their exclusive or, so that a header which is still arriving is not taken for one."""
    return torch.tensor([word - _SIGN for word in (record, digest, record ^ digest)], dtype=torch.int64)


def _unpack(header: torch.Tensor) -> tuple[int, int]:
    """(record, digest); (0, 0) while it has not arrived as a whole."""
    record, digest, check = (int(word) + _SIGN for word in header.tolist())
    return (record, digest) if record ^ digest == check else (0, 0)


def _header_tag(descriptor: Descriptor) -> int:
    return _HEADER_TAG + descriptor.sequence % SEQUENCES_WITH_OWN_TAG
