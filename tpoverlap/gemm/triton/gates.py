"""Where tiles find what peers send, and the words that tell when it is there. Addresses, no transport."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Slot:
    """One slot of a region on this rank. Made once and compared by identity: launches are found again by it.

    Attributes:
        data: its address: rows [T, K] of a gather; of a scatter one block [T_r, N] a peer, in rank order, ``rank``
            left out.
        words: address of int32 [R, words_per_rank], by source rank, which reach the epoch; 0: all is there.
        peers: int64 [R, 2] on the device: address of each rank's slot, and of this rank's words in it; None: nothing is
            sent by kernels.
    """

    data: int
    words: int
    rank: int = 0
    num_ranks: int = 2
    words_per_rank: int = 0
    peers: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class TradeSlot:
    """One slot of a region on every rank, and all words of this rank's exchanges there, for the kernels that do them.

    Attributes:
        data: the slot's address, by rank.
        flags: this rank's arrival flag, by the rank it lies on.
        told: this rank's ring of descriptors, by the rank it lies on.
        grants: this rank's credit, by the rank it lies on.
        arrivals, credits, descriptors: what rank 0 writes here; the next rank's are ``flags_bytes``, 4 and
            ``ring_bytes`` further.
        depth: uses of the region until the slot is used again.
        size_bytes: of the slot.
    """

    rank: int
    data: tuple[int, ...]
    flags: tuple[int, ...]
    told: tuple[int, ...]
    grants: tuple[int, ...]
    arrivals: int
    credits: int
    descriptors: int
    flags_bytes: int
    ring_bytes: int
    depth: int
    size_bytes: int
