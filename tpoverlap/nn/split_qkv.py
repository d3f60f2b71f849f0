"""Queries, keys and values out of the fused QKV output, with autograd: see `tpoverlap.nn.elementwise.qkv_heads`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpoverlap.errors import ActiveShapeError, ConfigError
from tpoverlap.nn.autograd import apply, differentiable_once
from tpoverlap.nn.elementwise import HeadLayout, merge_rotate, split_rotate, split_rotate_twin
from tpoverlap.nn.rotary import RotaryTable


def require_table(table: RotaryTable, num_tokens: int, head_dim: int) -> None:
    """Raise unless ``table`` has the angles of T rows and of a head's d/2 pairs.

    Raises:
        ConfigError: no table at all. ActiveShapeError: of another shape.
    """
    if not isinstance(table, RotaryTable):
        raise ConfigError(
            f"rotary_pos_emb must be a RotaryTable, got {type(table).__name__}; RotaryTable.of(positions, "
            f"{head_dim}) makes one, RotaryTable(cos, sin) takes angles that you have"
        )
    wanted = (num_tokens, 1, head_dim // 2)
    if head_dim % 2 or table.cos.shape != wanted or table.sin.shape != wanted:
        raise ActiveShapeError(
            f"rotary_pos_emb has cos {list(table.cos.shape)} and sin {list(table.sin.shape)}, but T={num_tokens} rows "
            f"of heads with {head_dim} features need {list(wanted)} each; make it of this microbatch's positions"
        )


def split_qkv(mixed: Tensor, table: RotaryTable | None, layout: HeadLayout) -> tuple[Tensor, Tensor, Tensor]:
    """``mixed`` [T, (A + 2G) d] -> q [T, A, d], k and v [T, G, d]; q and k turned by ``table``. Differentiable."""
    cos, sin = (None, None) if table is None else (table.cos, table.sin)
    if not torch.is_grad_enabled():
        return split_rotate(mixed, cos, sin, layout)
    if cos is not None and sin is not None and (cos.requires_grad or sin.requires_grad):
        return split_rotate_twin(mixed, cos, sin, layout)  # angles that train: autograd's own way
    if not mixed.requires_grad:
        return split_rotate(mixed, cos, sin, layout)
    result: tuple[Tensor, Tensor, Tensor] = apply(_SplitQkv, mixed, cos, sin, layout)
    return result


class _SplitQkv(torch.autograd.Function):
    """Linear in its input. Saved: the table alone."""

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, cos: Tensor | None, sin: Tensor | None, layout: HeadLayout
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.layout = layout
        ctx.save_for_backward(cos, sin)
        return split_rotate(mixed, cos, sin, layout)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (dq, dk, dv), (cos, sin) = grads, ctx.saved_tensors
        return merge_rotate(dq, dk, dv, cos, sin, ctx.layout), None, None, None
