"""Time of every method beside its twin, on GPUs that do not share: correctness first, rounds interleaved.

Traps this avoids: timing on zeros (bf16 products run faster), timing one method after the other (clocks drift), the
mean (one hiccup moves it), the fastest rank (the group is as fast as its slowest), and reading one output element.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import tpoverlap as tpo
from tpoverlap.testing import relative_error

Run = Callable[[], torch.Tensor]
OPERATIONS_A_ROUND = 4

_GATHER_CONFIGS: dict[str, dict[str, Any]] = {
    "ring_exchange": {"method": "ring_exchange"},
    "ring_exchange aggregate": {"method": "ring_exchange", "aggregate": True},
    "sequential": {"method": "sequential"},
}
_SCATTER_CONFIGS: dict[str, dict[str, Any]] = {
    "ring_exchange": {"method": "ring_exchange"},
    "pipeline 2": {"method": "pipeline", "num_splits": 2},
    "pipeline 4": {"method": "pipeline", "num_splits": 4},
    "sequential": {"method": "sequential"},
}


def measure_shape(
    rank: int, world_size: int, direction: str, num_tokens: int, in_features: int, out_features: int, rounds: int
) -> dict[str, Any]:
    """Median milliseconds of one operation for each method of ``direction`` ("ag" or "rs"), slowest rank.

    AG gathers x [T, K] and multiplies with [N, K]; RS multiplies x [T, K] with [N, K] and scatters y [T, N].
    """
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    generator = torch.Generator(device).manual_seed(1 + rank)
    width = in_features if direction == "ag" else out_features
    name = "qkv" if direction == "ag" else "proj"
    rows = tpo.TokenPartition.balanced(num_tokens, world_size).counts[rank]
    x = torch.randn(
        rows if direction == "ag" else num_tokens, in_features, device=device, dtype=torch.bfloat16, generator=generator
    )
    weight = torch.randn(out_features, in_features, device=device, dtype=torch.bfloat16, generator=generator)
    weight /= in_features**0.5
    configs = _GATHER_CONFIGS if direction == "ag" else _SCATTER_CONFIGS
    managers = {
        label: tpo.UserBufferManager(
            None,
            (num_tokens, width),
            device=device,
            ub_cfgs={f"{name}_fprop": options},
        )
        for label, options in configs.items()
    }
    call = tpo.all_gather_gemm if direction == "ag" else tpo.gemm_reduce_scatter
    runs: dict[str, Run] = {
        label: (lambda m=manager: call(x, weight, m.layer(name))) for label, manager in managers.items()
    }
    full = torch.randn(num_tokens, in_features, device=device, dtype=torch.bfloat16, generator=generator)
    runs["gemm alone"] = lambda: torch.mm(full, weight.t())
    with torch.no_grad():
        errors = _compare(runs, managers)
        times = _time(runs, rounds)
    for manager in managers.values():
        manager.check()
        manager.close()
    return {
        "direction": direction,
        "tokens": num_tokens,
        "in_features": in_features,
        "out_features": out_features,
        "relative_difference_to_sequential": errors,
        "time_ms": times,
    }


def _compare(runs: dict[str, Run], managers: dict[str, tpo.UserBufferManager]) -> dict[str, float]:
    reference = runs["sequential"]().float()
    errors = {}
    for label in managers:
        error = relative_error(runs[label]().float(), reference)
        if not error < 1e-2:
            raise AssertionError(f"{label} differs from sequential by {error:.2e}: not timing wrong numbers")
        errors[label] = error
    return errors


def _time(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    for run in runs.values():
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {label: [] for label in runs}
    for _ in range(rounds):
        for label, run in runs.items():
            dist.barrier()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(OPERATIONS_A_ROUND):
                run()
            end.record()
            torch.cuda.synchronize()
            times[label].append(begin.elapsed_time(end) / OPERATIONS_A_ROUND)
    medians: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(medians, {label: median(values) for label, values in times.items()})
    return {label: max(row[label] for row in medians) for label in runs}
