"""run_ranks on GPUs: one rank a GPU where they suffice, shared GPUs over gloo where they do not."""

from __future__ import annotations

import pytest
import torch

from tests.testing import rank_functions as functions
from tpoverlap.testing import run_ranks


@pytest.mark.gpu
def test_more_ranks_than_gpus() -> None:
    device_count = torch.cuda.device_count()
    world_size = device_count + 1
    results = run_ranks(functions.on_gpu, world_size, device="cuda", timeout_s=100)
    for rank, result in enumerate(results):
        assert result["device"] == rank % device_count
        assert "nccl" not in result["backend"], "NCCL refuses two ranks on one GPU"
        assert result["overlapping"] == "1"
        assert result["total"] == world_size * (world_size + 1) / 2
        assert result["tensor"].device.type == "cpu" and result["tensor"].tolist() == [rank, rank]


@pytest.mark.gpu
def test_a_gpu_a_rank() -> None:
    world_size = torch.cuda.device_count()
    for result in run_ranks(functions.on_gpu, world_size, device="cuda", timeout_s=100):
        assert "cuda:nccl" in result["backend"] and "cpu:gloo" in result["backend"]
        assert result["overlapping"] is None
    sums = run_ranks(functions.all_reduce_on_gpu, world_size, device="cuda", timeout_s=100)
    assert sums == [world_size * (world_size + 1) / 2] * world_size


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_no_gpu_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="torch sees no GPU"):
        run_ranks(functions.on_gpu, 1, device="cuda")
