"""What ranks know of each other's GPUs."""

from __future__ import annotations

import torch

from tpoverlap.comm.gpus import common_multiprocessors, gpu_of


def test_multiprocessors_that_all_ranks_have() -> None:
    assert gpu_of(torch.device("cpu")) == ("none", 0)
    assert common_multiprocessors([("a", 132), ("b", 132)]) == 132
    assert common_multiprocessors([("a", 132), ("b", 114)]) == 0
