"""The GPUs of a group, as far as all ranks have to know them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Gpu = tuple[str, int]
"""Its uuid and how many multiprocessors it has; ("none", 0): the CPU."""


def gpu_of(device: torch.device) -> Gpu:
    """What is there."""
    if device.type != "cuda":
        return "none", 0
    properties = torch.cuda.get_device_properties(device)
    return str(properties.uuid), properties.multi_processor_count


def common_multiprocessors(gpus: Sequence[Gpu]) -> int:
    """How many each of them has; 0 where they differ: then nothing that all ranks agree on may depend on it."""
    counts = {count for _, count in gpus}
    return counts.pop() if len(counts) == 1 else 0
