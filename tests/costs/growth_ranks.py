"""Rank function of `test_growth`: what a process holds, before and after many microbatches."""

from __future__ import annotations

import gc
import os
import random
import threading
from typing import Any

import psutil
import torch

import tpoverlap as tpo
from tests.manager.ranks import LogLines, make_manager

CAPACITY, WIDTH = 1024, 64


def _holdings(manager: tpo.UserBufferManager) -> dict[str, Any]:
    """Counted by the kernel and by Python, not by the package (but for ``allocations``, to compare)."""
    gc.collect()
    process = psutil.Process()
    mapped = [each for each in process.memory_maps(grouped=False) if "tpoverlap-" in each.path]
    return {
        "rss_bytes": process.memory_info().rss,
        "descriptors": process.num_fds(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "kernel_threads": process.num_threads(),
        "tensors": sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
        "shared_files": [name for name in os.listdir("/dev/shm") if name.startswith(f"tpoverlap-{process.pid}")],
        "mappings": len(mapped),
        "mapped_bytes": sum(each.size for each in mapped),
        "allocations": manager.memory_report()["allocations"],
    }


def microbatches(rank: int, size: int, backend: str, steps: int, warm_up: int) -> dict[str, Any]:
    """``steps`` random T in a row, forward and backward through a column and a row layer, of four methods in all."""
    generator = random.Random(2)
    config = {"proj_fprop": {"method": "pipeline", "num_splits": 2}, "fc2_fprop": {"method": "sequential"}}
    with make_manager(backend=backend, capacity_shape=(CAPACITY, WIDTH), ub_cfgs=config) as manager, LogLines() as log:
        mlp = [
            tpo.nn.Linear(WIDTH, 8 * size, parallel_mode="column", manager=manager, ub_name="qkv"),
            tpo.nn.Linear(8 * size, WIDTH, parallel_mode="row", manager=manager, ub_name="proj"),
            tpo.nn.Linear(WIDTH, 8 * size, parallel_mode="column", manager=manager, ub_name="fc1"),
            tpo.nn.Linear(8 * size, WIDTH, parallel_mode="row", manager=manager, ub_name="fc2"),
        ]

        def step(num_tokens: int) -> None:
            with manager.microbatch((num_tokens, WIDTH)) as partition:
                x = torch.ones(partition.counts[rank], WIDTH, requires_grad=True)
                y = x
                for layer in mlp:
                    y = layer(y)
                y.sum().backward()
            for layer in mlp:
                layer.zero_grad()

        step(CAPACITY)  # every page of the arena and of torch's allocator has been touched
        for _ in range(warm_up):
            step(generator.randint(1, CAPACITY))
        before = _holdings(manager)
        seen = set()
        for _ in range(steps):
            num_tokens = generator.randint(1, CAPACITY)
            seen.add(num_tokens)
            step(num_tokens)
        return {"before": before, "after": _holdings(manager), "different": len(seen), "lines": log.lines}
