"""The Triton kernels of `qkv_heads`: a program moves ``HEADS`` heads of one row, of whichever of the three kinds."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _angles(cos, sin, row, HALF: tl.constexpr, TURNS: tl.constexpr, HALF_BLOCK: tl.constexpr):
    """Cos and sin of a row's angles, [1, HALF_BLOCK]."""
    feature = tl.arange(0, HALF_BLOCK)
    if TURNS:
        inside = feature < HALF
        c = tl.load(cos + row * HALF + feature, mask=inside, other=1.0)
        s = tl.load(sin + row * HALF + feature, mask=inside, other=0.0)
    else:
        c = tl.full((HALF_BLOCK,), 1.0, tl.float32)
        s = tl.full((HALF_BLOCK,), 0.0, tl.float32)
    return c[None, :], s[None, :]


@triton.jit
def _places(row, head, GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, HALF: tl.constexpr):
    """Of head number ``head`` [HEADS] of a fused row: its place in its group, and its offsets in q and in k or v."""
    slot = head % (PER_GROUP + 2)
    group = head // (PER_GROUP + 2)
    in_q = (row * (GROUPS * PER_GROUP) + group * PER_GROUP + slot) * (2 * HALF)
    in_kv = (row * GROUPS + group) * (2 * HALF)
    return slot[:, None], in_q[:, None], in_kv[:, None]


@triton.jit(do_not_specialize=["blocks", "row_stride_units"])
def split_rotate(
    mixed,
    q,
    k,
    v,
    cos,
    sin,
    blocks,
    row_stride_units,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    HALF: tl.constexpr,
    UNIT: tl.constexpr,
    TURNS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """``q``, ``k``, ``v`` of the rows of ``mixed``.

    Args:
        blocks: of HEADS heads, a row.
        row_stride_units: mixed's row stride, in units of UNIT elements.
        HALF: half of a head's features.
    """
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    head = (program % blocks) * HEADS + tl.arange(0, HEADS)
    feature = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < GROUPS * (PER_GROUP + 2))[:, None] & (feature < HALF)
    start = mixed + row * row_stride_units * UNIT + head[:, None] * (2 * HALF) + feature
    first = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(start + HALF, mask=inside, other=0.0).to(tl.float32)
    c, s = _angles(cos, sin, row, HALF, TURNS, HALF_BLOCK)
    slot, in_q, in_kv = _places(row, head, GROUPS, PER_GROUP, HALF)
    is_value = slot == PER_GROUP + 1
    turned_first = tl.where(is_value, first, first * c - second * s).to(q.dtype.element_ty)
    turned_second = tl.where(is_value, second, second * c + first * s).to(q.dtype.element_ty)
    # One masked store a kind: a pointer chosen by kind would hide from the compiler that addresses are consecutive.
    to_q = inside & (slot < PER_GROUP)
    tl.store(q + in_q + feature, turned_first, mask=to_q)
    tl.store(q + in_q + HALF + feature, turned_second, mask=to_q)
    to_k = inside & (slot == PER_GROUP)
    tl.store(k + in_kv + feature, turned_first, mask=to_k)
    tl.store(k + in_kv + HALF + feature, turned_second, mask=to_k)
    to_v = inside & is_value
    tl.store(v + in_kv + feature, turned_first, mask=to_v)
    tl.store(v + in_kv + HALF + feature, turned_second, mask=to_v)


@triton.jit(do_not_specialize=["blocks"])
def merge_rotate(
    merged,
    q,
    k,
    v,
    cos,
    sin,
    blocks,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    HALF: tl.constexpr,
    UNIT: tl.constexpr,
    TURNS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """``merged`` (contiguous rows) of gradients ``q``, ``k``, ``v``, turned back. Arguments as above."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    head = (program % blocks) * HEADS + tl.arange(0, HEADS)
    feature = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < GROUPS * (PER_GROUP + 2))[:, None] & (feature < HALF)
    slot, in_q, in_kv = _places(row, head, GROUPS, PER_GROUP, HALF)
    is_value = slot == PER_GROUP + 1
    of_q = inside & (slot < PER_GROUP)
    of_k = inside & (slot == PER_GROUP)
    of_v = inside & is_value
    # A lane is of one kind; of the other two it loads nothing. Chosen, not added: -0 stays -0.
    q_first = tl.load(q + in_q + feature, mask=of_q, other=0.0).to(tl.float32)
    q_second = tl.load(q + in_q + HALF + feature, mask=of_q, other=0.0).to(tl.float32)
    k_first = tl.load(k + in_kv + feature, mask=of_k, other=0.0).to(tl.float32)
    k_second = tl.load(k + in_kv + HALF + feature, mask=of_k, other=0.0).to(tl.float32)
    v_first = tl.load(v + in_kv + feature, mask=of_v, other=0.0).to(tl.float32)
    v_second = tl.load(v + in_kv + HALF + feature, mask=of_v, other=0.0).to(tl.float32)
    is_query = slot < PER_GROUP
    first = tl.where(is_query, q_first, tl.where(is_value, v_first, k_first))
    second = tl.where(is_query, q_second, tl.where(is_value, v_second, k_second))
    c, s = _angles(cos, sin, row, HALF, TURNS, HALF_BLOCK)
    turned_first = tl.where(is_value, first, first * c + second * s)
    turned_second = tl.where(is_value, second, second * c - first * s)
    start = merged + row * (GROUPS * (PER_GROUP + 2) * 2 * HALF) + head[:, None] * (2 * HALF) + feature
    tl.store(start, turned_first.to(merged.dtype.element_ty), mask=inside)
    tl.store(start + HALF, turned_second.to(merged.dtype.element_ty), mask=inside)
