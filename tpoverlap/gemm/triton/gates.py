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
