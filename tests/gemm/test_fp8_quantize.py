"""Scales and round trips of FP8 tensors: bounds that follow from the formats, and numbers that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpoverlap.gemm.fp8 import QuantizedTensor, pack_rows, quantize, quantize_rows, scale_of, unpack_rows
from tpoverlap.gemm.fp8.quantize import tensor_amax

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = [E4M3, E5M2]
# Half a unit in the last place (3 and 2 mantissa bits), and half the smallest subnormal number, of either format.
HALF_ULP = {E4M3: 2.0**-4, E5M2: 2.0**-3}
HALF_TINY = {E4M3: 2.0**-10, E5M2: 2.0**-17}

magnitudes = st.floats(min_value=1e-30, max_value=1e30)
formats = st.sampled_from(FORMATS)


def _draw(rows: int, columns: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def _current(x: torch.Tensor, dtype: torch.dtype, *, rowwise: bool = False) -> QuantizedTensor:
    return quantize_rows(x, dtype) if rowwise else quantize(x, scale_of(tensor_amax(x), dtype), dtype)


@given(formats, st.integers(0, 5), st.integers(1, 33), magnitudes, st.booleans(), st.integers(0, 99))
def test_round_trip_is_within_half_a_unit(dtype, rows, columns, magnitude, rowwise, seed) -> None:
    x = _draw(rows, columns, seed, magnitude)
    quantised = _current(x, dtype, rowwise=rowwise)
    # One more float32 rounding each for the division and the multiplication.
    bound = x.abs() * HALF_ULP[dtype] * (1 + 1e-5) + quantised.scale * HALF_TINY[dtype] * (1 + 1e-5)
    assert quantised.data.dtype == dtype and quantised.dtype == torch.float32
    assert bool(((quantised.dequantize() - x).abs() <= bound).all())


@given(formats, magnitudes, st.integers(0, 99))
def test_the_largest_magnitude_uses_the_whole_range(dtype, magnitude, seed) -> None:
    x = _draw(4, 9, seed, magnitude)
    most = torch.finfo(dtype).max
    assert float(_current(x, dtype).data.float().abs().max()) == most
    assert bool((_current(x, dtype, rowwise=True).data.float().abs().amax(1) == most).all())


@given(formats, magnitudes, st.integers(-3, 3))
def test_scales(dtype, magnitude, margin) -> None:
    amax = torch.tensor([[magnitude]])
    plain = float(scale_of(amax, dtype))
    assert plain == pytest.approx(float(amax) / torch.finfo(dtype).max, rel=1e-6)
    assert float(scale_of(amax, dtype, margin=margin)) == pytest.approx(plain * 2.0**margin, rel=1e-6)
    power = float(scale_of(amax, dtype, power_of_2=True))
    assert math.frexp(power)[0] == 0.5, "a power of two"
    assert plain <= power < 2 * plain
    assert float(scale_of(amax, dtype, epsilon=2 * magnitude)) == pytest.approx(2 * plain, rel=1e-6)


def test_power_of_2_of_a_power_of_2_stays() -> None:
    amax = torch.tensor([[2.0**-7 * torch.finfo(E5M2).max]])
    assert float(scale_of(amax, E5M2, power_of_2=True)) == 2.0**-7


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("rowwise", [False, True])
def test_zeros_and_no_rows(dtype: torch.dtype, rowwise: bool) -> None:
    for rows in (0, 3):
        quantised = _current(torch.zeros(rows, 16), dtype, rowwise=rowwise)
        assert quantised.data.shape == (rows, 16)
        assert bool((quantised.scale == 1).all())
        assert torch.equal(quantised.dequantize(), torch.zeros(rows, 16))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("rowwise", [False, True])
def test_what_is_not_finite_stays_visible(dtype: torch.dtype, bad: float, rowwise: bool) -> None:
    x = torch.tensor([[1.0, bad, -2.0], [0.5, 3.0, 0.25]])
    result = _current(x, dtype, rowwise=rowwise).dequantize()
    assert bool(result[0, 1].isnan())
    finite = x.isfinite()
    assert torch.allclose(result[finite], x[finite], rtol=0.125)
    assert bool(result[finite].isfinite().all())


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_stale_scale_saturates(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    x = torch.tensor([[2 * most, -3e38, 1.0]])
    assert quantize(x, torch.ones(1, 1), dtype).data.float().tolist() == [[most, -most, 1.0]]


@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, 1e-37, 3e38])
@pytest.mark.parametrize("dtype", FORMATS)
def test_extreme_magnitudes_stay_finite(dtype: torch.dtype, magnitude: float) -> None:
    x = torch.full((2, 3), magnitude)
    quantised = _current(x, dtype)
    assert bool(quantised.scale.isfinite().all()) and bool((quantised.scale > 0).all())
    # 4 units: a product that ends among float32's own subnormal numbers has few bits left
    assert torch.allclose(quantised.dequantize(), x, rtol=1e-6, atol=1e-38)


def test_a_nan_makes_no_other_element_a_nan_over_ranks() -> None:
    amax = torch.tensor([[1.0], [math.nan]]).amax().reshape(1, 1)
    assert float(scale_of(amax, E4M3)) == 1.0


@pytest.mark.parametrize("dtype", FORMATS)
def test_transposed(dtype: torch.dtype) -> None:
    x = _draw(5, 7, 0)
    quantised = _current(x, dtype)
    assert torch.equal(quantised.transposed().dequantize(), quantised.dequantize().t())
    assert quantised.transposed().data.is_contiguous()


@given(formats, st.integers(0, 5), st.sampled_from([4, 12, 16, 48]), magnitudes, st.integers(0, 99))
def test_packed_rows_are_row_wise_tensors(dtype, rows, columns, magnitude, seed) -> None:
    x = _draw(rows, columns, seed, magnitude)
    packed = torch.full((rows, columns + 4), 7, dtype=torch.uint8)
    pack_rows(x, dtype, packed)
    assert torch.equal(unpack_rows(packed, dtype), _current(x, dtype, rowwise=True).dequantize())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_back_in_its_dtype(dtype: torch.dtype) -> None:
    x = _draw(6, 16, 1, dtype=dtype)
    back = _current(x, E4M3).dequantize()
    assert back.dtype == dtype
    assert torch.allclose(back.float(), x.float(), rtol=0.07, atol=1e-2)
