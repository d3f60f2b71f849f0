"""How much registered memory a manager takes: before (`memory_estimate`) and after (``mgr.memory_report()``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpoverlap.comm import Channel
from tpoverlap.config import resolve
from tpoverlap.config.resolver import ConfigSource
from tpoverlap.gemm.fp8 import MOST_MAXIMA, SCALE_BYTES
from tpoverlap.memory import ArenaLayout, RegionSpec
from tpoverlap.memory.layout import gather_slot_bytes, scatter_slot_bytes
from tpoverlap.setup import parse_capacity


def default_max_rows(capacity_tokens: int, tp_size: int) -> int:
    """ceil(C / R): enough for every balanced partition."""
    return -(-capacity_tokens // tp_size)


def standard_regions(
    capacity_tokens: int, width: int, itemsize_bytes: int, tp_size: int, max_rows_per_rank: int, suffix: str = ""
) -> tuple[RegionSpec, RegionSpec]:
    """The two regions that all names of one width share: all-gather and reduce-scatter."""
    return (
        RegionSpec(f"ag{suffix}", gather_slot_bytes(capacity_tokens, width, itemsize_bytes)),
        RegionSpec(f"rs{suffix}", scatter_slot_bytes(max_rows_per_rank, width, itemsize_bytes, tp_size)),
    )


def scales_region(capacity_tokens: int, tp_size: int) -> RegionSpec:
    """Of FP8 managers: the magnitudes of each rank's shard, float32, or a scale a row of the gathered activation."""
    return RegionSpec("scales", max(capacity_tokens, tp_size * MOST_MAXIMA) * SCALE_BYTES)


def manager_regions(
    capacity_tokens: int, width: int, itemsize_bytes: int, tp_size: int, max_rows_per_rank: int, *, fp8: bool
) -> tuple[RegionSpec, ...]:
    """All regions of a new manager: the standard two, and with FP8 the scales'."""
    regions = standard_regions(capacity_tokens, width, itemsize_bytes, tp_size, max_rows_per_rank)
    return (*regions, scales_region(capacity_tokens, tp_size)) if fp8 else regions


def memory_estimate(
    capacity_shape: tuple[int, int],
    tp_size: int,
    ub_cfgs: ConfigSource = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_rows_per_rank: int | None = None,
    fp8: bool = False,
) -> dict[str, Any]:
    """Bytes a rank that ``UserBufferManager`` would register. No device, no process group.

    Args:
        capacity_shape: (C, H).
        tp_size: R.
        ub_cfgs: checked; every name shares the same two regions, so options change nothing but staging.
        dtype: of the communicated activation.
        max_rows_per_rank: as for the manager.
        fp8: whether quantization_modes has FP8: the same regions and a small one for scales.

    Returns:
        ``symmetric_bytes`` (all of it), ``control_bytes``, ``regions`` (bytes by name), ``staging_bytes`` (the most
        that one reduce-scatter takes from torch's allocator while it runs), ``transformer_engine_bytes`` (the twelve
        buffers of TE at the same shape, for comparison).
    """
    capacity_tokens, width = parse_capacity(capacity_shape)
    resolve(ub_cfgs, tp_size, fp8=fp8)
    rows = default_max_rows(capacity_tokens, tp_size) if max_rows_per_rank is None else max_rows_per_rank
    itemsize = dtype.itemsize
    if tp_size == 1:
        layout = ArenaLayout(1, ())
        total, control = 0, 0
    else:
        layout = ArenaLayout(tp_size, manager_regions(capacity_tokens, width, itemsize, tp_size, rows, fp8=fp8))
        total, control = layout.total_bytes, layout.control_bytes
    return {
        "symmetric_bytes": total,
        "control_bytes": control,
        "regions": {spec.name: spec.depth * spec.slot_bytes for spec in layout.regions},
        "staging_bytes": capacity_tokens * width * itemsize,
        "transformer_engine_bytes": 12 * capacity_tokens * width * itemsize,
    }


def report_memory(
    channel: Channel | None,
    backend_name: str,
    staging: Sequence[torch.Tensor],
    capacity_shape: tuple[int, int],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """What a manager holds now; the keys of `memory_estimate` and, beside them, allocations and staging.

    Args:
        staging: buffers that ``get_buffer`` of reduce-scatter names has made, from torch's allocator.
    """
    arenas = [] if channel is None else channel.arenas
    regions = [] if channel is None else list(channel.regions.values())
    control_bytes = {id(region.arena): region.layout.control_bytes for region in regions}
    return {
        "backend": backend_name,
        "symmetric_bytes": sum(arena.size_bytes for arena in arenas),
        "control_bytes": sum(control_bytes.values()),
        "regions": {region.name: region.depth * region.slot_bytes for region in regions},
        "allocations": 0 if channel is None else channel.num_allocations,
        "staging_bytes": sum(tensor.numel() * tensor.element_size() for tensor in staging),
        "transient_staging_bytes": capacity_shape[0] * capacity_shape[1] * dtype.itemsize,
    }
