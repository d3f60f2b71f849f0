"""What ``mgr.explain`` prints: one operation in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tpoverlap.config import Note
from tpoverlap.dispatch import Decision
from tpoverlap.tokens import TokenPartition

if TYPE_CHECKING:
    from tpoverlap.communicator import CommOverlap


def explanation(
    communicator: CommOverlap,
    partition: TokenPartition,
    decision: Decision,
    backend: str,
    notes: Sequence[Note],
    dtype: torch.dtype,
) -> str:
    """Method, source and reason; rows and bytes; backend and why; what the configuration's checker had to say."""
    tokens, width = partition.total, communicator.width
    size_bytes = tokens * width * dtype.itemsize
    lines = [
        f"{communicator.name} at T={tokens}: {decision.method} ({communicator.config.direction})",
        f"  chosen by: {decision.source}: {decision.reason}",
        f"  rows a rank: {list(partition.counts)}; activation [{tokens}, {width}], {size_bytes} bytes",
        f"  backend: {backend}",
    ]
    return "\n".join(lines + [f"  {note.level}: {note}" for note in notes])
