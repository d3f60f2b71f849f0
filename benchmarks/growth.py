"""What a thousand token counts leave behind: memory of torch, of the driver and of the process. Host times: ``tpoverlap
bench --suite host``."""

from __future__ import annotations

from typing import Any

import psutil
import torch

import tpoverlap as tpo
from tpoverlap.tools.tune.measure import rank_device


def thousand_shapes(rank: int, world_size: int, device_type: str, count: int) -> dict[str, Any]:
    """Growth over ``count`` random T after a warm-up: torch's statistics, the driver's free memory, and RSS."""
    device = rank_device(rank, device_type)
    capacity, width = 2048, 256
    manager = tpo.UserBufferManager(None, (capacity, width), device=device, tuning_cache=False)
    weight = torch.randn(128, width, device=device, dtype=torch.bfloat16)
    back = torch.randn(width, 128, device=device, dtype=torch.bfloat16)
    inputs = torch.randn(capacity, width, device=device, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)

    def step(tokens: int) -> None:
        with manager.microbatch(tokens) as partition:
            hidden = tpo.all_gather_gemm(inputs[: partition.counts[rank]], weight, manager.layer("qkv"))
            assert isinstance(hidden, torch.Tensor), "one weight, one output"
            tpo.gemm_reduce_scatter(hidden, back, manager.layer("proj"))

    with torch.no_grad():
        step(capacity)
        for _ in range(100):
            step(int(torch.randint(1, capacity + 1, (1,), generator=generator)))
        manager.check()
        before = _memory(device)
        for _ in range(count):
            step(int(torch.randint(1, capacity + 1, (1,), generator=generator)))
        manager.check()
    after = _memory(device)
    allocations = manager.memory_report()["allocations"]
    manager.close()
    return {"arena_allocations": allocations} | {f"{key}_growth": after[key] - before[key] for key in before}


def _memory(device: torch.device) -> dict[str, int]:
    memory = {"rss_bytes": psutil.Process().memory_info().rss}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        memory["reserved_bytes"] = torch.cuda.memory_reserved(device)
        memory["allocated_bytes"] = torch.cuda.memory_allocated(device)
        memory["driver_used_bytes"] = torch.cuda.mem_get_info(device)[1] - torch.cuda.mem_get_info(device)[0]
    return memory
