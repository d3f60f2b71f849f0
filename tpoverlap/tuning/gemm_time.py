"""Time of a GEMM by shape: waves of tiles over the multiprocessors, never below what the memory allows.

The tiles are those a library chooses between; it is assumed to choose well. Non-decreasing in every argument. Of FP8
GEMMs ask `DeviceModel.in_fp8`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

from tpoverlap.tuning.device import DeviceModel

TILE_ROWS: Final = 128
TILE_COLUMNS: Final = 256
_TILES: Final = ((128, 256), (256, 128), (128, 128), (64, 256), (128, 64), (64, 128), (64, 64))
_FLOAT32_FACTOR: Final = 2.0  # float32 inputs take TF32 at best: half the rate


def gemm_time_us(
    device: DeviceModel, rows: int, columns: int, inner: int, itemsize_bytes: int = 2, result_bytes: int | None = None
) -> float:
    """Microseconds of [rows, inner] x [inner, columns], launch included; 0 for an empty one.

    ``itemsize_bytes``: of an element of the operands. ``result_bytes``: of one of the result; None: as many.
    """
    time_us = cool_time_us(device, rows, columns, inner, itemsize_bytes, result_bytes)
    return time_us * slowdown(device, time_us)


def cool_time_us(
    device: DeviceModel, rows: int, columns: int, inner: int, itemsize_bytes: int = 2, result_bytes: int | None = None
) -> float:
    """The same at the clock of a short GEMM. Parts of a long one take this times the `slowdown` of the whole."""
    if min(rows, columns, inner) <= 0:
        return 0.0
    rates = device.gemm
    compute = tile_units(device.multiprocessors, rates.small_tile_exponent, rates.quantisation, rows, columns)
    compute *= rates.tile_us_per_k * inner + rates.tile_fixed_us
    if itemsize_bytes > 2:
        compute *= _FLOAT32_FACTOR
    moved = (rows * inner + inner * columns) * itemsize_bytes
    moved += rows * columns * (itemsize_bytes if result_bytes is None else result_bytes)
    memory = moved / device.memory_gb_s * 1e-3
    return rates.launch_us + max(compute, memory)


def slowdown(device: DeviceModel, cool_us: float) -> float:
    """How much longer a GEMM of ``cool_us`` takes because the clock follows the power; at least 1."""
    return float(max(1.0, cool_us / 1000.0) ** device.gemm.sustained_exponent)


@lru_cache(maxsize=4096)
def tile_units(multiprocessors: int, small_tile_exponent: float, quantisation: float, rows: int, columns: int) -> float:
    """Waves of 128 x 256 tiles that the best choice of tile amounts to."""
    best = math.inf
    for tile_rows, tile_columns in _TILES:
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
        full = -(-tiles // multiprocessors)
        waves = quantisation * full + (1.0 - quantisation) * max(1.0, tiles / multiprocessors)
        share = tile_rows * tile_columns / (TILE_ROWS * TILE_COLUMNS)
        best = min(best, waves * share ** (1.0 - small_tile_exponent))
    return best
