"""FP8 tasks against float32 of the dequantised operands (tight), and against the original numbers (FP8's tolerance)."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tpoverlap.errors import ActiveShapeError
from tpoverlap.gemm.fp8 import (
    Float8CurrentScaling,
    Float8RowwiseScaling,
    PackedPartialGemm,
    QuantizedTensor,
    Quantizer,
    Recipe,
    ScaledPartialGemm,
    ScaledRowGemm,
    require_features,
    scaled_weight_grad,
    unpack_rows,
)

K, N, N2 = 48, 32, 64
TOKENS = [1, 2, 7, 15, 16, 17, 31, 48, 129]
RECIPES = [Float8CurrentScaling(), Float8CurrentScaling("e4m3"), Float8RowwiseScaling()]
# One rounding of the output; float32 sums in another order.
TIGHT = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

on_all = pytest.mark.parametrize("recipe", RECIPES, ids=["hybrid", "e4m3", "rowwise"])
on_dtypes = pytest.mark.parametrize("dtype", list(TIGHT), ids=str)


def _draw(rows: int, columns: int, key: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(key)) * scale).to(dtype)


def _quantise(recipe: Recipe, role: str, x: torch.Tensor) -> QuantizedTensor:
    return Quantizer(recipe, role).local(x, record=False)  # type: ignore[arg-type]


def _wide(tensor: QuantizedTensor) -> torch.Tensor:
    return tensor.data.double() * tensor.scale.double()


def _assert_tight(actual: torch.Tensor, expected: torch.Tensor) -> None:
    bound = TIGHT[actual.dtype] * 1.01
    assert torch.allclose(actual.double(), expected, rtol=bound, atol=bound * float(expected.abs().max()))


def _assert_fp8(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = float(expected.abs().max())
    error = float((actual.double() - expected).norm() / expected.norm())
    assert error < 0.0625, error  # two operands, half a unit each: at most 2 * 2**-4 e4m3, and random signs
    assert torch.allclose(actual.double(), expected, rtol=0.125, atol=0.0625 * scale)


@on_all
@on_dtypes
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_rows_in_chunks(recipe: Recipe, dtype: torch.dtype, num_tokens: int) -> None:
    x, weights = _draw(num_tokens, K, 0, dtype), [_draw(N, K, 1, dtype, K**-0.5), _draw(N2, K, 2, dtype, K**-0.5)]
    bias = _draw(1, N, 3, dtype)[0]
    quantised, weights8 = _quantise(recipe, "input", x), [_quantise(recipe, "weight", w) for w in weights]
    outs = [torch.full((num_tokens, w.shape[0]), float("nan"), dtype=dtype) for w in weights]
    gemm = ScaledRowGemm(
        weights=weights8, biases=[bias, None], outs=outs, x_scale=quantised.scale, x_format=quantised.data.dtype
    )
    cuts = sorted({0, num_tokens // 3, num_tokens - 1, num_tokens})
    for start, stop in pairwise(cuts):
        gemm.rows(quantised.bytes[start:stop], start)
    gemm.rows(quantised.bytes[:0], num_tokens)  # a rank without rows
    for out, weight, weight8, one_bias in zip(outs, weights, weights8, (bias, None), strict=True):
        shift = 0 if one_bias is None else one_bias.double()
        _assert_tight(out, _wide(quantised) @ _wide(weight8).t() + shift)
        _assert_fp8(out, x.double() @ weight.double().t() + shift)


@on_all
@on_dtypes
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_partial_rows_and_columns(recipe: Recipe, dtype: torch.dtype, num_tokens: int) -> None:
    grads = [_draw(num_tokens, size, size, dtype) for size in (N, N2)]
    weights = [_draw(K, size, size + 1, dtype, size**-0.5) for size in (N, N2)]  # transposed: [K, N_i]
    addend, bias = _draw(num_tokens, K, 8, dtype), _draw(1, K, 9, dtype)[0]
    terms = [
        (_quantise(recipe, "grad", dy), _quantise(recipe, "weight", w)) for dy, w in zip(grads, weights, strict=True)
    ]
    gemm = ScaledPartialGemm(terms=terms, addend=addend, bias=bias)
    assert (gemm.num_rows, gemm.width, gemm.dtype) == (num_tokens, K, dtype)
    expected = sum(_wide(left) @ _wide(right).t() for left, right in terms) + addend.double()
    original = sum(dy.double() @ w.double().t() for dy, w in zip(grads, weights, strict=True)) + addend.double()
    own = slice(num_tokens // 2, num_tokens)
    out = gemm.empty(num_tokens, K).fill_(float("nan"))
    gemm.rows(0, own.start, out[: own.start])
    gemm.rows(own.start, own.stop, out[own], owned=True)
    expected[own] += bias.double()
    original[own] += bias.double()
    # bf16 sums of two terms, addend and bias are rounded one by one, as addmm_ does
    assert float((out.double() - expected).norm() / expected.norm()) < 3 * TIGHT[dtype]
    if recipe.dtype("grad") == torch.float8_e4m3fn:
        _assert_fp8(out, original)
    pieces = [(0, 16), (16, 20), (20, K)]  # also one that no tensor core would take
    by_columns = torch.cat([_columns(gemm, start, stop, own) for start, stop in pieces], dim=1)
    assert float((by_columns.double() - expected).norm() / expected.norm()) < 3 * TIGHT[dtype]


def _columns(gemm: ScaledPartialGemm, start: int, stop: int, own: slice) -> torch.Tensor:
    out = gemm.empty(gemm.num_rows, stop - start).fill_(float("nan"))
    gemm.columns(start, stop, out, own)
    return out


@on_all
@pytest.mark.parametrize("num_tokens", [1, 7, 33])
def test_packed_partial_sums(recipe: Recipe, num_tokens: int) -> None:
    x, weight = _draw(num_tokens, K, 0), _draw(N, K, 1)
    bias = _draw(1, N, 3)[0]
    inner = ScaledPartialGemm(terms=[(_quantise(recipe, "input", x), _quantise(recipe, "weight", weight))], bias=bias)
    packed = PackedPartialGemm(gemm=inner, packed_format=torch.float8_e4m3fn)
    out, plain = packed.empty(num_tokens, N), inner.empty(num_tokens, N)
    assert out.shape == (num_tokens, N + 4) and packed.dtype == out.dtype == torch.uint8
    packed.rows(0, num_tokens, out, owned=True)
    inner.rows(0, num_tokens, plain, owned=True)
    bound = plain.abs() * 2.0**-4 + plain.abs().amax(1, keepdim=True) / 448 * 2.0**-10
    assert bool(((unpack_rows(out, torch.float8_e4m3fn) - plain).abs() <= bound * 1.0001).all())
    for start, stop in ((0, 16), (16, N)):
        part = packed.empty(num_tokens, stop - start)
        packed.columns(start, stop, part, slice(0, num_tokens))
        values = unpack_rows(part, torch.float8_e4m3fn)
        assert bool(((values - plain[:, start:stop]).abs() <= bound[:, start:stop] * 1.0001).all())


@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
@on_dtypes
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_weight_grad(fp8_format: str, dtype: torch.dtype, num_tokens: int) -> None:
    recipe = Float8CurrentScaling(fp8_format)
    dy, x = _draw(num_tokens, N, 0, dtype), _draw(num_tokens, K, 1, dtype)
    dy8, x8 = _quantise(recipe, "grad", dy), _quantise(recipe, "input", x)
    dy_t, x_t = dy8.padded_transposed(), x8.padded_transposed()
    assert dy_t.data.shape == (N, -(-num_tokens // 16) * 16) and dy_t.data.is_contiguous()
    out = torch.empty(N, K, dtype=dtype)
    scaled_weight_grad(dy_t, x_t, out)
    _assert_tight(out, _wide(dy8).t() @ _wide(x8))


def test_feature_sizes_say_what_to_do() -> None:
    require_features("fc1", "in_features", 16, 4096)
    with pytest.raises(
        ActiveShapeError, match=r"fc1: in_features 24 is not a multiple of 16.*pad .* to 32.*without fp8"
    ):
        require_features("fc1", "in_features", 32, 24)


@pytest.mark.gpu
@on_all
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_tensor_cores_give_the_reference(recipe: Recipe, dtype: torch.dtype, num_tokens: int) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 tensor cores")
    if isinstance(recipe, Float8RowwiseScaling) and dtype != torch.bfloat16:
        pytest.skip("row-wise GEMMs write bfloat16 only")
    x, weight, bias = _draw(num_tokens, K, 0, dtype), _draw(N, K, 1, dtype), _draw(1, N, 3, dtype)[0]
    results = []
    for device in ("cpu", "cuda"):
        x8, w8 = _quantise(recipe, "input", x.to(device)), _quantise(recipe, "weight", weight.to(device))
        out = torch.empty(num_tokens, N, dtype=dtype, device=device)
        gemm = ScaledRowGemm(
            weights=[w8], biases=[bias.to(device)], outs=[out], x_scale=x8.scale, x_format=x8.data.dtype
        )
        gemm.rows(x8.bytes, 0)
        results.append((x8.bytes.cpu(), out.cpu().double()))
    assert torch.equal(results[0][0], results[1][0]), "the same bytes on both"
    # Inside a block of K tensor cores add products with some 14 bits, whatever the output is.
    bound = max(TIGHT[dtype], 2.0**-11)
    expected = results[0][1]
    assert torch.allclose(results[1][1], expected, rtol=bound, atol=bound * float(expected.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("start", [0, 1, 3, 16])
def test_row_wise_chunks_on_tensor_cores(bias: bool, start: int) -> None:
    """Chunks whose scales start anywhere, and a bias: what cuBLASLt wants in another way."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 tensor cores")
    num_tokens, depth, width = 257, 512, 256
    x, weight = _draw(num_tokens, depth, 0, torch.bfloat16).cuda(), _draw(width, depth, 1, torch.bfloat16).cuda()
    shift = _draw(1, width, 3, torch.bfloat16)[0].cuda() if bias else None
    x8, w8 = (_quantise(Float8RowwiseScaling(), role, one) for role, one in (("input", x), ("weight", weight)))
    out = torch.zeros(num_tokens, width, dtype=torch.bfloat16, device="cuda")
    gemm = ScaledRowGemm(weights=[w8], biases=[shift], outs=[out], x_scale=x8.scale, x_format=x8.data.dtype)
    gemm.rows(x8.bytes[start:], start)
    expected = _wide(x8) @ _wide(w8).t() + (0 if shift is None else shift.double())
    assert not bool(out[:start].any())
    bound = 2.0**-7  # rounded before the bias and after it; fast accumulation
    assert torch.allclose(out[start:].double(), expected[start:], rtol=bound, atol=bound * float(expected.abs().max()))
    partial = ScaledPartialGemm(terms=[(x8, w8)], bias=shift)
    part = partial.empty(num_tokens, 64)
    partial.columns(128, 192, part, slice(start, num_tokens))
    assert torch.allclose(
        part[start:].double(), expected[start:, 128:192], rtol=bound, atol=bound * float(expected.abs().max())
    )
