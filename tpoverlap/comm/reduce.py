"""The owner's sum: float32, in rank order, rounded once. The same sum for every method, so results are comparable."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sum_in_rank_order(blocks: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """``out[:] = blocks[0] + blocks[1] + ...``, accumulated in float32 and rounded once to ``out.dtype``.

    Args:
        blocks: R partial sums of equal shape, in rank order, in the communicated dtype.
        out: where the sum goes; may not alias a block.
    """
    if len(blocks) == 1:
        out.copy_(blocks[0])
    elif len(blocks) == 2:
        # One kernel: torch adds two half-precision tensors in float32 and rounds the result once.
        torch.add(blocks[0], blocks[1], out=out)
    elif out.dtype == torch.float32:
        torch.add(blocks[0], blocks[1], out=out)
        for block in blocks[2:]:
            out.add_(block)
    else:
        total = blocks[0].float()
        for block in blocks[1:]:
            total.add_(block)
        out.copy_(total)
