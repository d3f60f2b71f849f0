"""Host time of one operation, and what a new T costs. Also meaningful when ranks share a GPU: nothing waits for it."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import psutil
import torch

import tpoverlap as tpo


def host_time(rank: int, world_size: int, device_type: str, repeats: int) -> dict[str, float]:
    """Median microseconds until the call returns: AG and RS by ring, with T repeated and with a new T every time."""
    device = _device(rank, device_type)
    capacity, width = 4096, 512
    manager = tpo.UserBufferManager(None, (capacity, width), device=device)
    weight = torch.randn(256, width, device=device, dtype=torch.bfloat16)
    back = torch.randn(width, 256, device=device, dtype=torch.bfloat16)
    inputs = torch.randn(capacity, width, device=device, dtype=torch.bfloat16)
    hidden = torch.randn(capacity, 256, device=device, dtype=torch.bfloat16)
    samples: dict[str, list[float]] = {"set_shape_us": [], "ag_same_us": [], "ag_new_us": [], "rs_same_us": []}
    with torch.no_grad():
        for index in range(repeats + 20):
            tokens = 2048 + 17 * (index % 97)
            begin = time.perf_counter()
            manager.set_active_shape((tokens, width))
            shape_set = time.perf_counter()
            own = inputs[: manager.partition.counts[rank]]  # type: ignore[union-attr]  # it was just set
            ready = time.perf_counter()
            tpo.all_gather_gemm(own, weight, manager.layer("qkv"))
            first = time.perf_counter()
            tpo.all_gather_gemm(own, weight, manager.layer("qkv"))
            second = time.perf_counter()
            tpo.gemm_reduce_scatter(hidden[:tokens], back, manager.layer("proj"))
            third = time.perf_counter()
            manager.check()
            if index >= 20:
                samples["set_shape_us"].append(1e6 * (shape_set - begin))
                samples["ag_new_us"].append(1e6 * (first - ready))
                samples["ag_same_us"].append(1e6 * (second - first))
                samples["rs_same_us"].append(1e6 * (third - second))
    manager.close()
    return {label: median(values) for label, values in samples.items()}


def thousand_shapes(rank: int, world_size: int, device_type: str, count: int) -> dict[str, Any]:
    """Growth over ``count`` random T after a warm-up: torch's statistics, the driver's free memory, and RSS."""
    device = _device(rank, device_type)
    capacity, width = 2048, 256
    manager = tpo.UserBufferManager(None, (capacity, width), device=device)
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


def _device(rank: int, device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
