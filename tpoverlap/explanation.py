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
    remark: str = "",
) -> str:
    """Method, source and reason; rows and bytes; backend and why; what the configuration's checker had to say.

    ``remark``: about the choice by T, empty where there is none.
    """
    tokens, width = partition.total, communicator.width
    size_bytes = tokens * width * dtype.itemsize
    method = decision.method
    if method == "pipeline" and decision.config is not None:
        method += f" in {decision.config.num_splits}"
    lines = [
        f"{communicator.name} at T={tokens}: {method} ({communicator.config.direction})",
        f"  chosen by: {decision.source}: {decision.reason}",
        *([f"  by T: {remark}"] if remark else []),
        f"  rows a rank: {list(partition.counts)}; activation [{tokens}, {width}], {size_bytes} bytes",
        f"  backend: {backend}",
    ]
    return "\n".join(lines + [f"  {note.level}: {note}" for note in notes])
