"""The Triton kernels of `gated`: a program computes ``BLOCK`` features of one row."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gate(g, GATE: tl.constexpr):
    """(act(g), act'(g)), float32. tanh(z) is 2 sigmoid(2 z) - 1, so that gelu needs no tanh."""
    if GATE == "silu":
        s = tl.sigmoid(g)
        value = g * s
        slope = s * (1.0 + g * (1.0 - s))
    elif GATE == "gelu":
        square = g * g
        s = tl.sigmoid(1.5957691216057308 * g * (1.0 + 0.044715 * square))  # 2 sqrt(2 / pi)
        value = g * s
        slope = s + value * (1.0 - s) * (1.5957691216057308 * (1.0 + 3.0 * 0.044715 * square))
    else:
        tl.static_assert(GATE == "relu")
        value = tl.where((g > 0) | (g != g), g, 0.0)  # a NaN stays one, as in torch
        slope = tl.where(g > 0, 1.0, 0.0)
    return value, slope


@triton.jit(do_not_specialize=["width_units", "blocks", "row_stride_units"])
def gated_forward(
    h, y, width_units, blocks, row_stride_units, GATE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    """``y`` [rows, width] = act(g) u of ``h`` [rows, 2 width].

    Args:
        width_units, row_stride_units: F and h's row stride, in units of UNIT elements: so the compiler knows what they
            are multiples of.
        blocks: of BLOCK features, a row.
    """
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    width = width_units * UNIT
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    start = h + row * row_stride_units * UNIT
    g = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(start + width + column, mask=inside, other=0.0).to(tl.float32)
    value, _ = _gate(g, GATE)
    tl.store(y + row * width + column, (value * u).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["width_units", "blocks", "row_stride_units", "dy_stride_units"])
def gated_backward(
    h,
    dy,
    dh,
    width_units,
    blocks,
    row_stride_units,
    dy_stride_units,
    GATE: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``dh`` [rows, 2 width] = [dy u act'(g), dy act(g)]. As above; ``dy_stride_units`` is dy's row stride."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    width = width_units * UNIT
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    start = h + row * row_stride_units * UNIT
    g = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(start + width + column, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(dy + row * dy_stride_units * UNIT + column, mask=inside, other=0.0).to(tl.float32)
    value, slope = _gate(g, GATE)
    out = dh + row * (2 * width) + column
    tl.store(out, (gradient * u * slope).to(dh.dtype.element_ty), mask=inside)
    tl.store(out + width, (gradient * value).to(dh.dtype.element_ty), mask=inside)
