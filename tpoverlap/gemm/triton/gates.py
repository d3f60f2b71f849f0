"""What the tiles of a kernel wait for: words in memory, and rows that peers send. Addresses, no transport."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gate:
    """Words that gated tiles wait for: int32 at ``address``, indexed by the plan's words, to reach ``epoch``."""

    address: int
    epoch: int


@dataclass(frozen=True)
class Received:
    """What peers sent of own rows: at ``address`` one block [rows, N] a peer, in rank order, this ``rank`` left out.

    ``gate``: words of the blocks, ``words_per_rank`` a source rank, which the tiles wait for before they add; None: all
    is there.
    """

    address: int
    rank: int
    num_ranks: int
    gate: Gate | None = None
    words_per_rank: int = 0
