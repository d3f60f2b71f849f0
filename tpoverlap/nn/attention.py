"""Attention over packed sequences: every row attends to rows of its own sequence. No mask of size T x T exists.

====================================  ======================================================================
where                                 how
====================================  ======================================================================
CUDA, bfloat16 or float16             torch's variable-length attention, else flash-attn if it is installed:
                                      one launch for all sequences
everything else                       one ``scaled_dot_product_attention`` a sequence
====================================  ======================================================================
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpoverlap.errors import BackendUnavailableError
from tpoverlap.nn.sequences import PackedSequences


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, *, causal: bool = True, scale: float | None = None
) -> Tensor:
    """Softmax(q k^T * scale) v within each sequence.

    Args:
        q: [T, heads, d].
        k, v: [T, groups, d]; heads is a multiple of groups (grouped-query attention).
        sequences: whose rows are whose.
        causal: rows attend to earlier rows only (and to themselves).
        scale: None: d ** -0.5.

    Returns:
        [T, heads, d], in the dtype of q.

    Raises:
        BackendUnavailableError: CUDA without any variable-length kernel.
    """
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return _on_cuda(q, k, v, sequences, causal, scale)
    offsets = sequences.host_offsets
    parts = []
    for start, end in pairwise(offsets):
        # [1, heads, S, d]: without the batch dimension torch takes a path ten times slower that stores all scores.
        q_heads, k_heads, v_heads = (t[start:end].transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(
            q_heads, k_heads, v_heads, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        parts.append(attended.squeeze(0).transpose(0, 1))
    return torch.cat(parts)


def _on_cuda(q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, causal: bool, scale: float | None) -> Tensor:
    offsets, longest = sequences.offsets, sequences.max_seqlen
    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    if find_spec("torch.nn.attention.varlen") is not None:
        from torch.nn.attention.varlen import varlen_attn

        if q.shape[1] != k.shape[1]:
            if _takes_groups():
                options["enable_gqa"] = True
            else:
                k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        window = (-1, 0) if causal else (-1, -1)
        out: Any = varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=window, **options)
    elif find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_varlen_func

        scales = {} if scale is None else {"softmax_scale": scale}
        out = flash_attn_varlen_func(q, k, v, offsets, offsets, longest, longest, causal=causal, **scales)
    else:
        raise BackendUnavailableError(
            "attention over packed sequences on CUDA needs torch.nn.attention.varlen (torch 2.10) or flash-attn"
        )
    assert isinstance(out, Tensor), "without auxiliary outputs the result is one tensor"
    return out


@lru_cache(maxsize=1)
def _takes_groups() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
