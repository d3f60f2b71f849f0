"""Tolerances that let a wrong tensor pass would make every other test worthless."""

from __future__ import annotations

import math

import pytest
import torch

from tpoverlap.testing import assert_close_to_twin, assert_elementwise, numeric, relative_error

NAN, INF = math.nan, math.inf


def _gemm(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x @ w.T in dtype, the same with K in another order, float32 reference)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(37, 96, generator=generator).to(dtype)
    w = torch.randn(24, 96, generator=generator).to(dtype)
    order = torch.randperm(96, generator=generator)
    return x @ w.t(), x[:, order] @ w[:, order].t(), x.float() @ w.float().t()


def test_relative_error_values() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.0]), reference) == 0.0
    assert relative_error(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.ones(2), torch.zeros(2)) == INF
    assert relative_error(torch.empty(0, 4), torch.empty(0, 4)) == 0.0
    assert math.isnan(relative_error(torch.tensor([NAN, 4.0]), reference))
    assert relative_error(torch.tensor([1e30, 1e30]), torch.tensor([1e30, 1e30])) == 0.0
    with pytest.raises(AssertionError, match=r"shape \[1, 2\], expected \[2\]"):
        relative_error(reference[None], reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_another_order_of_additions_passes(dtype: torch.dtype) -> None:
    twin, actual, reference = _gemm(dtype)
    assert_close_to_twin(actual, twin, reference)
    assert_close_to_twin(twin, twin, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_bad_row_fails(dtype: torch.dtype) -> None:
    twin, actual, reference = _gemm(dtype)
    for change in (lambda row: row.zero_(), lambda row: row.mul_(2), lambda row: row.fill_(NAN)):
        broken = actual.clone()
        change(broken[5])
        with pytest.raises(AssertionError, match=r"y: relative error .*worst at \[5, \d+\]: got .*, expected"):
            assert_close_to_twin(broken, twin, reference, what="y")


def test_the_factor_is_what_it_says() -> None:
    reference = torch.ones(numeric.FEW, dtype=torch.float64)
    twin = reference + 1e-3
    assert_close_to_twin(reference + 1.24e-3, twin, reference)
    with pytest.raises(AssertionError, match=r"1\.25 x 1\.000e-03"):
        assert_close_to_twin(reference + 1.26e-3, twin, reference)


def test_few_elements_get_a_larger_factor() -> None:
    reference = torch.ones(64, dtype=torch.float64)
    twin = reference + 1e-3
    assert_close_to_twin(reference + 1.8e-3, twin, reference)
    with pytest.raises(AssertionError, match=r"1\.875 x 1\.000e-03"):
        assert_close_to_twin(reference + 1.9e-3, twin, reference)


def test_an_exact_twin_leaves_only_rounding() -> None:
    reference = torch.ones(100, dtype=torch.float64)
    assert_close_to_twin(reference + 4e-7, reference, reference)
    with pytest.raises(AssertionError):
        assert_close_to_twin(reference + 6e-7, reference, reference)


def test_a_broken_twin_excuses_nothing() -> None:
    ones = torch.ones(4)
    for bad in (NAN, INF):
        twin = torch.tensor([1.0, bad, 1.0, 1.0])
        with pytest.raises(AssertionError, match=r"the twin itself.*worst at \[1\]"):
            assert_close_to_twin(twin, twin, ones)
    with pytest.raises(AssertionError, match="dtype"):
        assert_close_to_twin(ones.bfloat16(), ones, ones)
    with pytest.raises(AssertionError, match="shape"):
        assert_close_to_twin(ones[:3], ones, ones)


def test_elementwise() -> None:
    reference = torch.tensor([[1.0, -2.0], [0.0, 100.0]])
    assert_elementwise(reference * 1.015, reference)
    assert_elementwise(reference + torch.tensor([[0.0, 0.0], [9e-4, 0.0]]), reference)
    with pytest.raises(AssertionError, match=r"x: 1 of 4 elements .*worst at \[1, 0\]: got 0\.01\d*, expected 0\.0"):
        assert_elementwise(reference + torch.tensor([[0.0, 0.0], [0.011, 0.0]]), reference, what="x")
    with pytest.raises(AssertionError, match=r"worst at \[0, 1\]: got -2\.25, expected -2\.0"):
        assert_elementwise(torch.tensor([[1.0, -2.25], [0.0, 101.0]]), reference)
    assert_elementwise(torch.empty(0, 3), torch.empty(0, 3))
    with pytest.raises(AssertionError, match="shape"):
        assert_elementwise(reference[:1], reference)


@pytest.mark.parametrize(("actual", "reference"), [(NAN, 1.0), (1.0, NAN), (NAN, NAN), (INF, 1.0), (INF, INF)])
def test_not_a_number_never_passes(actual: float, reference: float) -> None:
    a, b = torch.tensor([1.0, actual]), torch.tensor([1.0, reference])
    with pytest.raises(AssertionError):
        assert_elementwise(a, b)
    with pytest.raises(AssertionError):
        assert_close_to_twin(a, torch.ones(2), b)
