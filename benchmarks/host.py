"""Host time of one operation, and what a new T costs. Also meaningful when ranks share a GPU: nothing waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import psutil
import torch

import tpoverlap as tpo
from tpoverlap import TokenPartition

WARM_UP = 20


def host_time(rank: int, world_size: int, device_type: str, repeats: int) -> dict[str, float]:
    """Median microseconds until the call returns.

    ``ag_new_us``, ``ag_same_us``: an all-gather by ring at a new T (setting it included), and the same again;
    ``rs_same_us``: a reduce-scatter by ring. ``seq_..``: the sequential twins, NCCL's calls included.
    ``ag_grad_us``: with gradients wanted. ``mm_new_us``, ``mm_same_us``: torch.mm alone, which pays for new shapes too.
    """
    device = _device(rank, device_type)
    capacity, width = 4096, 512
    config = {
        "qkv_fprop": {"method": "ring_exchange"},
        "proj_fprop": {"method": "ring_exchange"},
        "fc1_fprop": {"method": "sequential"},
        "fc2_fprop": {"method": "sequential"},
    }
    manager = tpo.UserBufferManager(None, (capacity, width), device=device, ub_cfgs=config, tuning_cache=False)
    weight = torch.randn(256, width, device=device, dtype=torch.bfloat16)
    back = torch.randn(width, 256, device=device, dtype=torch.bfloat16)
    inputs = torch.randn(capacity, width, device=device, dtype=torch.bfloat16)
    hidden = torch.randn(capacity, 256, device=device, dtype=torch.bfloat16)
    wanted = weight.clone().requires_grad_()
    samples: dict[str, list[float]] = {}

    def measured(label: str, work: Callable[[], object]) -> None:
        begin = time.perf_counter()
        work()
        samples.setdefault(label, []).append(1e6 * (time.perf_counter() - begin))

    with torch.no_grad():
        for index in range(repeats + WARM_UP):
            tokens = 2048 + 17 * (index % 97)

            def gather(count: int = TokenPartition.balanced(tokens, world_size).counts[rank]) -> object:
                return tpo.all_gather_gemm(inputs[:count], weight, manager.layer("qkv"))

            def shape_and_gather(set_to: int = tokens) -> object:
                manager.set_active_shape((set_to, width))
                return gather()

            # Right after the check everything is cold, for the first call whichever it is: so one goes before.
            measured("set_shape_us", partial(manager.set_active_shape, (tokens - 1, width)))
            tpo.all_gather_gemm(
                inputs[: TokenPartition.balanced(tokens - 1, world_size).counts[rank]], weight, manager.layer("qkv")
            )
            measured("ag_new_us", shape_and_gather)
            measured("ag_same_us", gather)
            scatter = partial(tpo.gemm_reduce_scatter, hidden[:tokens], back)
            shard = inputs[: TokenPartition.balanced(tokens, world_size).counts[rank]]
            measured("rs_same_us", partial(scatter, manager.layer("proj")))
            for layer, label in (("fc1", "seq_ag_us"), ("fc2", "seq_rs_us")):
                one = (
                    partial(scatter, manager.layer(layer))
                    if label == "seq_rs_us"
                    else (partial(tpo.all_gather_gemm, shard, weight, manager.layer(layer)))
                )
                one()
                measured(label, one)
            with torch.enable_grad():
                measured("ag_grad_us", partial(tpo.all_gather_gemm, shard, wanted, manager.layer("qkv")))
            for label in ("mm_new_us", "mm_same_us"):
                measured(label, partial(torch.mm, inputs[: tokens - 8], weight.t()))  # a shape that nothing above had
            manager.check()
    manager.close()
    return {label: median(values[WARM_UP:]) for label, values in samples.items()}


def thousand_shapes(rank: int, world_size: int, device_type: str, count: int) -> dict[str, Any]:
    """Growth over ``count`` random T after a warm-up: torch's statistics, the driver's free memory, and RSS."""
    device = _device(rank, device_type)
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


def _device(rank: int, device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
