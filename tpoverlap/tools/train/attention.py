"""Rotary positions and causal attention over packed sequences. Both work on whole rows [T, heads, d] of local heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tpoverlap.tools.train.packing import PackedBatch


@dataclass(frozen=True)
class RotaryTable:
    """cos and sin of every row's angles, float32 [T, 1, d/2]: once a step, shared by all layers."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, batch: PackedBatch, head_dim: int, base: float) -> RotaryTable:
        """Angles of ``batch.positions``, which restart at every document."""
        exponent = torch.arange(0, head_dim, 2, device=batch.positions.device, dtype=torch.float32) / head_dim
        angles = batch.positions.to(torch.float32)[:, None] * base**-exponent
        return cls(angles.cos()[:, None, :], angles.sin()[:, None, :])

    def rotate(self, x: Tensor) -> Tensor:
        """[T, heads, d] -> the same shape and dtype, feature i turned together with feature i + d/2."""
        first, second = x.float().chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, dim=-1).to(x.dtype)


def packed_causal_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Sequence[int]) -> Tensor:
    """Every row attends to the earlier rows of its own sequence.

    q, k, v: [T, heads, d]; the result has their shape and dtype. Rows behind ``cu_seqlens[-1]`` (padding) belong to no
    sequence and give zeros. bfloat16 and float16 on CUDA use the variable-length flash kernel, one launch for all
    sequences; everything else one ``scaled_dot_product_attention`` a sequence.
    """
    num_rows = cu_seqlens[-1]
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        out = _varlen(q[:num_rows], k[:num_rows], v[:num_rows], cu_seqlens)
    else:
        parts = []
        for start, end in pairwise(cu_seqlens):
            # [1, heads, S, d]: without the batch dimension torch takes a path ten times slower that stores all scores.
            q_heads, k_heads, v_heads = (t[start:end].transpose(0, 1).unsqueeze(0) for t in (q, k, v))
            attended = F.scaled_dot_product_attention(q_heads, k_heads, v_heads, is_causal=True)
            parts.append(attended.squeeze(0).transpose(0, 1))
        out = torch.cat(parts)
    return F.pad(out, (0, 0, 0, 0, 0, q.shape[0] - num_rows)) if q.shape[0] > num_rows else out


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Sequence[int]) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    offsets = torch.tensor(cu_seqlens, dtype=torch.int32).to(q.device, non_blocking=True)
    longest = max(end - start for start, end in pairwise(cu_seqlens))
    out = varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=(-1, 0))  # (-1, 0): causal
    assert isinstance(out, Tensor), "varlen_attn without return_aux gives one tensor"
    return out
