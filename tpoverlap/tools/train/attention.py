"""`tpoverlap.nn`'s rotary positions and attention for a `PackedBatch`, which may end in padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

import tpoverlap as tpo
from tpoverlap.nn.attention import packed_attention
from tpoverlap.tools.train.packing import PackedBatch


def rotary_table(batch: PackedBatch, head_dim: int, base: float) -> tpo.nn.RotaryTable:
    """Angles of ``batch.positions``, which restart at every document."""
    return tpo.nn.RotaryTable.of(batch.positions, head_dim, base)


def packed_causal_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Sequence[int]) -> Tensor:
    """Every row attends to the earlier rows of its own sequence.

    q, k, v: [T, heads, d]; the result has their shape and dtype. Rows behind ``cu_seqlens[-1]`` (padding) belong to no
    sequence and give zeros.
    """
    num_rows = cu_seqlens[-1]
    sequences = tpo.nn.PackedSequences(cu_seqlens, num_rows, q.device)
    out = packed_attention(q[:num_rows], k[:num_rows], v[:num_rows], sequences)
    return F.pad(out, (0, 0, 0, 0, 0, q.shape[0] - num_rows)) if q.shape[0] > num_rows else out
