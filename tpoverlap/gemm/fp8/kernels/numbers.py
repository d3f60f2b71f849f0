"""Device functions: magnitudes, scales, float32 numbers as FP8 bytes. Bit for bit what `gemm.fp8.plain` computes."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(x):
    """The bits of ``|x|`` (float32) as int32: they order as the numbers do, and NaN comes after infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax, factor, epsilon, POWER_OF_2: tl.constexpr):
    """As `plain.scale_of`: what magnitude ``amax`` is divided by; 1 where it is 0 or not finite."""
    amax = tl.where(amax < epsilon, epsilon, amax)  # a NaN stays one
    scale = amax * factor
    if POWER_OF_2:  # any mantissa at all takes the next exponent; beyond the largest it becomes infinite, see below
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & ~0x7FFFFF
        scale = bits.to(tl.float32, bitcast=True)
    scale = tl.minimum(tl.maximum(scale, 1.1754943508222875e-38), 3.4028234663852886e38)
    return tl.where((amax > 0) & (magnitude_bits(amax) < 0x7F800000), scale, 1.0)


@triton.jit
def largest_of(maxima, count, BLOCK: tl.constexpr):
    """The largest of ``count`` float32 magnitudes; NaN if there is one."""
    largest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, magnitude_bits(tl.load(maxima + index, mask=index < count, other=0.0)))
    return tl.max(largest, 0).to(tl.float32, bitcast=True)


@triton.jit
def to_bytes(x, inverse, E5M2: tl.constexpr, INTERPRETED: tl.constexpr):
    """``x * inverse`` in FP8, as uint8: finite numbers saturate, others become NaN."""
    finite = magnitude_bits(x) < 0x7F800000
    most: tl.constexpr = 57344.0 if E5M2 else 448.0
    scaled = tl.minimum(tl.maximum(x * inverse, -most), most)
    if INTERPRETED:  # the interpreter's own conversion carries no mantissa into the exponent
        bits = _rounded_bits(scaled, E5M2)
    elif E5M2:
        bits = scaled.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        bits = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(finite, bits, 0x7F).to(tl.uint8)


@triton.jit
def to_numbers(bits, E5M2: tl.constexpr, INTERPRETED: tl.constexpr):
    """FP8 bytes as float32."""
    if INTERPRETED:
        numbers = _number_of(bits.to(tl.int32), E5M2)
    elif E5M2:
        numbers = bits.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        numbers = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return numbers


@triton.jit
def _rounded_bits(x, E5M2: tl.constexpr):
    """A float32 within the format's range, rounded to the nearest FP8 number, ties to even, in integers."""
    mantissa: tl.constexpr = 2 if E5M2 else 3
    bias: tl.constexpr = 15 if E5M2 else 7
    dropped: tl.constexpr = 23 - mantissa
    bits = magnitude_bits(x)
    half: tl.constexpr = (1 << (dropped - 1)) - 1
    normal = ((bits + half + ((bits >> dropped) & 1)) >> dropped) - ((127 - bias) << mantissa)
    # Below the smallest normal number: adding this makes float32 itself round at the smallest subnormal one.
    magic: tl.constexpr = 2.0 ** (24 - bias - mantissa)
    subnormal = (tl.abs(x) + magic).to(tl.int32, bitcast=True) - ((127 + 24 - bias - mantissa) << 23)
    found = tl.where(bits < ((128 - bias) << 23), subnormal, normal)
    return found | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def _number_of(bits, E5M2: tl.constexpr):
    mantissa: tl.constexpr = 2 if E5M2 else 3
    bias: tl.constexpr = 15 if E5M2 else 7
    last_number: tl.constexpr = 0x7C if E5M2 else 0x7E
    low = bits & 0x7F
    fraction = low & ((1 << mantissa) - 1)
    exponent = low >> mantissa
    normal = (((exponent + (127 - bias)) << 23) | (fraction << (23 - mantissa))).to(tl.float32, bitcast=True)
    quantum: tl.constexpr = 2.0 ** (1 - bias - mantissa)
    number = tl.where(exponent == 0, fraction.to(tl.float32) * quantum, normal)
    if E5M2:
        number = tl.where(low == 0x7C, float("inf"), number)
    number = tl.where(bits >= 0x80, -number, number)
    return tl.where(low > last_number, float("nan"), number)
