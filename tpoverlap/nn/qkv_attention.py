"""From the fused QKV output to attention's, as one autograd node: split, turn, attend.

========  =================================================  ==================================================
          computes                                           shapes on rank r (A, G heads and groups of this rank)
========  =================================================  ==================================================
forward   q, k, v = split and turned; out = attention        [T,(A+2G)d] -> [T,A d]
backward  dq, dk, dv; merged and turned back                 [T,A d] -> [T,(A+2G)d]
========  =================================================  ==================================================

Saved: q, k, v, out, one float32 a row and head, and the table. On CUDA in bfloat16 and float16 it is torch's flash
attention, by the operators below ``torch.nn.attention.varlen``: those take grouped queries without a copy of k and v in
every release, and cost the host one call each way. Elsewhere it is `split_qkv` and `packed_attention`.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from tpoverlap.nn.attention import packed_attention
from tpoverlap.nn.autograd import apply, differentiable_once
from tpoverlap.nn.elementwise import HeadLayout, merge_rotate, split_rotate
from tpoverlap.nn.rotary import RotaryTable
from tpoverlap.nn.sequences import PackedSequences
from tpoverlap.nn.split_qkv import split_qkv

logger = logging.getLogger("tpoverlap")

_FORWARD: Final = (
    *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"),
    "return_debug_mask",
)
_BACKWARD: Final = (
    *("grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
    *("dropout_p", "is_causal"),
)
_FEATURES_MULTIPLE, _MOST_FEATURES = 8, 256
"""Of a head: what the flash kernels take."""


def qkv_attention(
    mixed: Tensor, table: RotaryTable | None, layout: HeadLayout, sequences: PackedSequences, *, causal: bool
) -> Tensor:
    """[T, (A + 2G) d], group by group (`HeadLayout`), -> [T, A d]: attention within each sequence. Differentiable.

    Args:
        mixed: the fused QKV output.
        table: turns queries and keys; None: nothing turns.
        layout: of a row of ``mixed``.
        sequences: whose rows are whose.
        causal: rows attend to earlier rows only (and to themselves).

    Raises:
        BackendUnavailableError: as `packed_attention`.
    """
    learnt = table is not None and (table.cos.requires_grad or table.sin.requires_grad)
    if learnt or not _takes_flash(mixed, layout):
        q, k, v = split_qkv(mixed, table, layout)
        return packed_attention(q, k, v, sequences, causal=causal).flatten(1)
    cos, sin = (None, None) if table is None else (table.cos, table.sin)
    if not (mixed.requires_grad and torch.is_grad_enabled()):
        q, k, v = split_rotate(mixed, cos, sin, layout)
        return flash_forward(q, k, v, sequences, causal)[0].flatten(1)
    out: Tensor = apply(_QkvAttention, mixed, cos, sin, layout, sequences, causal)
    return out


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out [T, A, d], log of the sums, and two tensors that backward wants back)."""
    offsets, longest = sequences.offsets, sequences.max_seqlen
    found = torch.ops.aten._flash_attention_forward(
        *(q, k, v, offsets, offsets, longest, longest, 0.0, causal, False),
        window_size_left=-1,
        window_size_right=0 if causal else -1,
    )
    return found[0], found[1], found[2], found[3]


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, forward: tuple[Tensor, ...], sequences: PackedSequences, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of dout [T, A, d]; ``forward`` is what `flash_forward` returned."""
    offsets, longest = sequences.offsets, sequences.max_seqlen
    out, sums, *random = forward
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *(dout, q, k, v, out, sums, offsets, offsets, longest, longest, 0.0, causal, *random),
        window_size_left=-1,
        window_size_right=0 if causal else -1,
    )
    return dq, dk, dv


class _QkvAttention(torch.autograd.Function):
    """See the table above."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        layout: HeadLayout,
        sequences: PackedSequences,
        causal: bool,
    ) -> Tensor:
        q, k, v = split_rotate(mixed, cos, sin, layout)
        found = flash_forward(q, k, v, sequences, causal)
        ctx.layout, ctx.sequences, ctx.causal = layout, sequences, causal
        ctx.save_for_backward(cos, sin, q, k, v, *found)
        return found[0].view(q.shape[0], -1)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cos, sin, q, k, v, *found = ctx.saved_tensors
        dout = grads[0].view(q.shape) if grads[0].is_contiguous() else grads[0].reshape(q.shape)
        dq, dk, dv = flash_backward(dout, q, k, v, tuple(found), ctx.sequences, ctx.causal)
        return merge_rotate(dq, dk, dv, cos, sin, ctx.layout), None, None, None, None, None


def _takes_flash(mixed: Tensor, layout: HeadLayout) -> bool:
    return (
        mixed.is_cuda
        and mixed.dtype in (torch.bfloat16, torch.float16)
        and mixed.shape[0] > 0
        and layout.head_dim % _FEATURES_MULTIPLE == 0
        and layout.head_dim <= _MOST_FEATURES
        and not torch.compiler.is_compiling()
        and _has_flash(mixed.device)
    )


@lru_cache(maxsize=16)
def _has_flash(device: torch.device) -> bool:
    """Whether this torch has the operators in the form that is called here, and kernels for ``device``."""
    if torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    if torch.backends.cuda.is_flash_attention_available() and operators_fit():
        return True
    logger.warning(
        "%s: torch %s has no flash operators in the form that is called here; attention goes through "
        "torch.nn.attention.varlen or flash-attn, which costs the host more",
        device,
        torch.__version__,
    )
    return False


def operators_fit() -> bool:
    """Whether the arguments that are passed by position are where this file expects them."""
    for operator, names in (("_flash_attention_forward", _FORWARD), ("_flash_attention_backward", _BACKWARD)):
        found = getattr(torch.ops.aten, operator, None)
        if found is None:
            return False
        arguments = [argument.name for argument in found.default._schema.arguments]
        if tuple(arguments[: len(names)]) != names or not {"window_size_left", "window_size_right"} <= set(arguments):
            return False
    return True
