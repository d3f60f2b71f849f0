"""The fused QKV output in, queries, keys and values out, the first two turned by their position; and the way back.

A = heads, G = groups, of this rank; d = head_dim. A row of ``mixed`` is group by group: A/G query heads, the key head,
the value head.

========  ==================================================  ======================================================
          computes                                            shapes
========  ==================================================  ======================================================
split     q, k = turned by +angle; v                          [T,(A+2G)d] -> [T,A,d], [T,G,d], [T,G,d], contiguous
merge     dmixed = dq, dk turned by -angle; dv                [T,A,d], [T,G,d], [T,G,d] -> [T,(A+2G)d]
========  ==================================================  ======================================================

Feature i turns together with feature i + d/2, in float32, and is rounded once. Without a table nothing turns.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from tpoverlap.nn.elementwise.launch import DirectKernel, runs_kernels, vector_unit

_ELEMENTS: Final = 1024
"""Of each half of the features, a program."""
_NUM_WARPS: Final = 4


class HeadLayout(NamedTuple):
    """How a row of the fused QKV output is made up."""

    groups: int
    """Key heads, and value heads."""
    per_group: int
    """Query heads of each."""
    head_dim: int

    @property
    def width(self) -> int:
        """Features of a row."""
        return self.groups * (self.per_group + 2) * self.head_dim


def split_rotate(
    mixed: Tensor, cos: Tensor | None, sin: Tensor | None, layout: HeadLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """(q [T, A, d], k [T, G, d], v [T, G, d]) of ``mixed`` [T, (A + 2G) d], whose rows may be strided.

    Args:
        mixed: the fused output.
        cos, sin: [T, 1, d/2], float32 (promoted otherwise); None: nothing turns.
        layout: of a row.
    """
    if runs_kernels(mixed) and mixed.stride(1) == 1 and layout.head_dim % 2 == 0:
        return split_rotate_kernel(mixed, cos, sin, layout)
    return split_rotate_twin(mixed, cos, sin, layout)


def merge_rotate(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor | None, sin: Tensor | None, layout: HeadLayout
) -> Tensor:
    """The gradient [T, (A + 2G) d] of what `split_rotate` took, from those of what it gave."""
    if runs_kernels(dq) and layout.head_dim % 2 == 0:
        return merge_rotate_kernel(dq, dk, dv, cos, sin, layout)
    return merge_rotate_twin(dq, dk, dv, cos, sin, layout)


def split_rotate_twin(
    mixed: Tensor, cos: Tensor | None, sin: Tensor | None, layout: HeadLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """`split_rotate` in plain torch."""
    groups, per_group, head_dim = layout
    grouped = mixed.view(-1, groups, per_group + 2, head_dim)
    q = grouped[:, :, :per_group].reshape(-1, groups * per_group, head_dim)
    k, v = grouped[:, :, per_group], grouped[:, :, per_group + 1]
    if cos is not None and sin is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    # Never a view of the input: autograd treats an output that is one in another way.
    return tuple(part.clone(memory_format=torch.contiguous_format) for part in (q, k, v))  # type: ignore[return-value]


def merge_rotate_twin(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor | None, sin: Tensor | None, layout: HeadLayout
) -> Tensor:
    """`merge_rotate` in plain torch."""
    groups, per_group, head_dim = layout
    if cos is not None and sin is not None:
        dq, dk = rotate(dq, cos, -sin), rotate(dk, cos, -sin)
    merged = dq.new_empty(dq.shape[0], groups, per_group + 2, head_dim)
    merged[:, :, :per_group] = dq.reshape(-1, groups, per_group, head_dim)
    merged[:, :, per_group] = dk
    merged[:, :, per_group + 1] = dv
    return merged.view(-1, layout.width)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, heads, d] -> the same shape and dtype, each pair of features turned by its angle."""
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


def split_rotate_kernel(
    mixed: Tensor, cos: Tensor | None, sin: Tensor | None, layout: HeadLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """`split_rotate` by the Triton kernel (on the CPU: in its interpreter)."""
    groups, per_group, head_dim = layout
    rows, row_stride = mixed.shape[0], mixed.stride(0)
    q = mixed.new_empty(rows, groups * per_group, head_dim)
    k = mixed.new_empty(rows, groups, head_dim)
    v = mixed.new_empty(rows, groups, head_dim)
    unit = vector_unit(row_stride)
    blocks, constants = _plan(layout, unit, cos is not None)
    cos, sin = _tables(mixed, cos, sin)
    _kernels()[0].launch(rows * blocks, (mixed, q, k, v, cos, sin), (blocks, row_stride // unit), constants)
    return q, k, v


def merge_rotate_kernel(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor | None, sin: Tensor | None, layout: HeadLayout
) -> Tensor:
    """`merge_rotate` by the Triton kernel (on the CPU: in its interpreter)."""
    rows = dq.shape[0]
    merged = dq.new_empty(rows, layout.width)
    blocks, constants = _plan(layout, 1, cos is not None)
    cos, sin = _tables(merged, cos, sin)
    _kernels()[1].launch(
        rows * blocks, (merged, dq.contiguous(), dk.contiguous(), dv.contiguous(), cos, sin), (blocks,), constants
    )
    return merged


@lru_cache(maxsize=64)
def _plan(layout: HeadLayout, unit: int, turns: bool) -> tuple[int, tuple[object, ...]]:
    """(blocks of heads a row, the kernel's constants)."""
    half = layout.head_dim // 2
    half_block = 1 << max(0, half - 1).bit_length()
    heads = max(1, _ELEMENTS // half_block)
    total = layout.groups * (layout.per_group + 2)
    return -(-total // heads), (layout.groups, layout.per_group, half, unit, turns, heads, half_block)


def _tables(stand_in: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor]:
    if cos is None or sin is None:
        return stand_in, stand_in  # the kernel does not read them
    if cos.dtype != torch.float32 or not cos.is_contiguous():
        cos = cos.to(torch.float32).contiguous()
    if sin.dtype != torch.float32 or not sin.is_contiguous():
        sin = sin.to(torch.float32).contiguous()
    return cos, sin


@lru_cache(maxsize=1)
def _kernels() -> tuple[DirectKernel, DirectKernel]:
    from tpoverlap.nn.elementwise import qkv_heads_kernels as kernels

    return DirectKernel(kernels.split_rotate, _NUM_WARPS), DirectKernel(kernels.merge_rotate, _NUM_WARPS)
