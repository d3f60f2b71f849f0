"""What a new number of rows costs ``torch.mm`` itself: the part of a new T's price that no library can remove."""

from __future__ import annotations

import time
from statistics import median

import torch

WARM_UP = 20


def mm_host_time(rank: int, world_size: int, device_type: str, repeats: int) -> dict[str, float]:
    """Median microseconds until ``torch.mm(x[:t], w.t(), out=)`` returns: at a t not seen before, and at it again."""
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    rows, width, features = 4096, 512, 256
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    weight = torch.randn(features, width, device=device, dtype=torch.bfloat16)
    out = torch.empty(rows, features, device=device, dtype=torch.bfloat16)
    samples: dict[str, list[float]] = {"mm_new_us": [], "mm_same_us": []}
    for index in range(repeats + WARM_UP):
        count = 1024 + 17 * index % 3000
        for label in ("mm_new_us", "mm_same_us"):
            begin = time.perf_counter()
            torch.mm(x[:count], weight.t(), out=out[:count])
            samples[label].append(1e6 * (time.perf_counter() - begin))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return {label: median(values[WARM_UP:]) for label, values in samples.items()}
