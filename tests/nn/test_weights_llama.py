"""A Hugging Face Llama checkpoint into tensor-parallel layers, and back: numbers, names and bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.nn import plain_llama, weight_ranks
from tpoverlap.testing import RankPool


@pytest.mark.parametrize("tied", [False, True])
def test_there_and_back_at_several_sizes(rank_pool: Callable[[int], RankPool], tied: bool) -> None:
    """Each size loads what the one before gave back."""
    original = plain_llama.checkpoint(tied=tied)
    tensors = original
    for size in (2, 3, 1):
        results = rank_pool(size).run(weight_ranks.llama_there_and_back, tied, tensors, timeout_s=60.0)
        for found in results:
            assert set(found) == set(original)
            for name, value in original.items():
                assert torch.equal(found[name], value), f"{name} at R={size}"
        tensors = results[-1]
