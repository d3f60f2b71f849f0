"""One step's documents as tensors: packed tokens, targets and ``cu_seqlens`` (the THD layout, nothing padded)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED_TARGET = -100


@dataclass(frozen=True)
class PackedBatch:
    """Documents one behind the other.

    Attributes:
        tokens: int64 [T], one byte a token.
        targets: int64 [T], the next byte of the same document; IGNORED_TARGET at each document's last token.
        positions: int64 [T], 0 at the start of each document.
        cu_seqlens: first row of each document, and the end of the last; on the host, since T is known there.
        num_targets: targets that are not ignored.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    cu_seqlens: tuple[int, ...]
    num_targets: int

    @property
    def num_tokens(self) -> int:
        """Rows of ``tokens``: T, or C after ``padded_to(C)``."""
        return self.tokens.shape[0]

    @property
    def num_sequences(self) -> int:
        """Documents of this step."""
        return len(self.cu_seqlens) - 1

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch on ``device``."""
        tokens, targets, positions = (t.to(device) for t in (self.tokens, self.targets, self.positions))
        return replace(self, tokens=tokens, targets=targets, positions=positions)

    def padded_to(self, num_rows: int) -> PackedBatch:
        """Rows of byte 0 behind the documents, without a target and outside every sequence: for ``--compare``."""
        extra = num_rows - self.num_tokens
        return replace(
            self,
            tokens=F.pad(self.tokens, (0, extra)),
            targets=F.pad(self.targets, (0, extra), value=IGNORED_TARGET),
            positions=F.pad(self.positions, (0, extra)),
        )


def pack(documents: Sequence[bytes]) -> PackedBatch:
    """Documents of at least two bytes each -> one packed batch on the CPU."""
    tokens = torch.frombuffer(bytearray(b"".join(documents)), dtype=torch.uint8).to(torch.int64)
    cu_seqlens = (0, *accumulate(len(document) for document in documents))
    targets = F.pad(tokens[1:], (0, 1))
    targets[torch.tensor(cu_seqlens[1:]) - 1] = IGNORED_TARGET
    positions = torch.cat([torch.arange(end - start) for start, end in pairwise(cu_seqlens)])
    return PackedBatch(tokens, targets, positions, cu_seqlens, len(tokens) - len(documents))
