"""The owner's sum: float32, in rank order, rounded once."""

from __future__ import annotations

import pytest
import torch

from tpoverlap.comm.reduce import sum_in_rank_order

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _blocks(count: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(33, 7, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_rank_order_in_float32(count: int, dtype: torch.dtype) -> None:
    blocks = _blocks(count, dtype)
    out = torch.full_like(blocks[0], float("nan"))
    sum_in_rank_order(blocks, out)
    wanted = blocks[0].float()
    for block in blocks[1:]:
        wanted = wanted + block.float()
    assert torch.equal(out, wanted.to(dtype)), "bit by bit: the order is part of the contract"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_single_rounding(count: int, dtype: torch.dtype) -> None:
    """Within half a unit of the exact sum, which adding in the communicated dtype does not reach."""
    blocks = _blocks(count, dtype, seed=1)
    out = torch.empty_like(blocks[0])
    sum_in_rank_order(blocks, out)
    exact = sum(block.double() for block in blocks)
    assert isinstance(exact, torch.Tensor)
    half_unit = torch.finfo(dtype).eps / 2 * exact.abs() + count * torch.finfo(torch.float32).eps * sum(
        block.double().abs() for block in blocks
    )
    assert bool(((out.double() - exact).abs() <= half_unit).all())
    if count > 2:
        careless = blocks[0]
        for block in blocks[1:]:
            careless = careless + block
        assert not torch.equal(careless, out), "the test would not notice a sum in the wrong dtype"


def test_order_matters_and_is_kept() -> None:
    """1e8 + 1 - 1e8 in float32 is 0 from the left and 1 with the large ones first."""
    blocks = [torch.full((2,), value) for value in (1e8, 1.0, -1e8)]
    out = torch.empty(2)
    sum_in_rank_order(blocks, out)
    assert out.tolist() == [0.0, 0.0]
    sum_in_rank_order([blocks[0], blocks[2], blocks[1]], out)
    assert out.tolist() == [1.0, 1.0]


def test_into_a_strided_target_and_from_strided_blocks() -> None:
    """Pipeline reduces column ranges of wider tensors."""
    wide = [torch.arange(24.0).view(4, 6) * (rank + 1) for rank in range(3)]
    target = torch.full((4, 6), -1.0)
    sum_in_rank_order([block[:, 2:5] for block in wide], target[:, 2:5])
    assert torch.equal(target[:, 2:5], (wide[0] * 6)[:, 2:5])
    assert bool((target[:, :2] == -1).all()) and bool((target[:, 5:] == -1).all())
