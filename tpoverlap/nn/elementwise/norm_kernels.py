"""The Triton kernels of `norms`: a whole row in one program's registers, read once."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _scale(weight, column, inside, ZERO_CENTERED: tl.constexpr):
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        scale += 1.0
    return scale


@triton.jit(do_not_specialize=["width_units", "row_stride_units"])
def norm_forward(
    x,
    weight,
    bias,
    y,
    mean,
    rstd,
    width_units,
    row_stride_units,
    EPS: tl.constexpr,
    CENTRED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``y`` [rows, width] contiguous; ``rstd`` (and ``mean`` if CENTRED, which has a ``bias``, too) float32 [rows].

    Args:
        width_units, row_stride_units: H and x's row stride, in units of UNIT elements.
        CENTRED: LayerNorm; else RMSNorm. ZERO_CENTERED: the scale is 1 + weight.
        BLOCK: power of two, at least H.
    """
    row = tl.program_id(0).to(tl.int64)
    width = width_units * UNIT
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * row_stride_units * UNIT + column, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        centre = tl.sum(value, 0) / width
        value = tl.where(inside, value - centre, 0.0)
        tl.store(mean + row, centre)
    factor = tl.rsqrt(tl.sum(value * value, 0) / width + EPS)
    tl.store(rstd + row, factor)
    out = value * factor * _scale(weight, column, inside, ZERO_CENTERED)
    if CENTRED:
        out += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, out.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "width_units", "row_stride_units", "dy_stride_units"])
def norm_backward(
    x,
    weight,
    dy,
    dx,
    mean,
    rstd,
    partial,
    rows,
    width_units,
    row_stride_units,
    dy_stride_units,
    CENTRED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``dx`` of every row, and each program's sums over its rows: every so many, always in the same order.

    Args:
        partial: float32 [programs, width], dweight; or [programs, 2 width], dweight beside dbias, if CENTRED.
        NEEDS_WEIGHT: whether there is a ``partial``.
    """
    width = width_units * UNIT
    column = tl.arange(0, BLOCK)
    inside = column < width
    scale = _scale(weight, column, inside, ZERO_CENTERED)
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    bias_sum = tl.zeros((BLOCK,), tl.float32)
    x_stride = row_stride_units.to(tl.int64) * UNIT
    dy_stride = dy_stride_units.to(tl.int64) * UNIT
    dx_stride = width.to(tl.int64)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(dy + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(rstd + row)
        if CENTRED:
            value = tl.where(inside, value - tl.load(mean + row), 0.0)
        value *= factor
        scaled = gradient * scale
        out = scaled - value * (tl.sum(value * scaled, 0) / width)
        if CENTRED:
            out -= tl.sum(scaled, 0) / width
        tl.store(dx + row * dx_stride + column, (out * factor).to(dx.dtype.element_ty), mask=inside)
        if NEEDS_WEIGHT:
            weight_sum += gradient * value
            if CENTRED:
                bias_sum += gradient
    if NEEDS_WEIGHT:
        if CENTRED:
            start = partial + tl.program_id(0).to(tl.int64) * (2 * width)
            tl.store(start + width + column, bias_sum, mask=inside)
        else:
            start = partial + tl.program_id(0).to(tl.int64) * width
        tl.store(start + column, weight_sum, mask=inside)


@triton.jit(do_not_specialize=["count", "width"])
def add_partials(out, partial, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``out`` [width] = the sum over ``count`` rows of ``partial`` [count, width], in an order that never changes."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    line = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, count, ROWS):
        row = (start + line)[:, None]
        inside = (row < count) & (column < width)[None, :]
        total += tl.load(partial + row.to(tl.int64) * width + column[None, :], mask=inside, other=0.0)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < width)
