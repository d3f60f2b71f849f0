"""Triton kernels: GEMM tiles that wait for flags, bump counters or add what arrived; copies by multiprocessors.

They know no transport: only a resident buffer, addresses of monotonic 32-bit words, and the values to wait for.
Importing this package imports no Triton; `kernels` does, on first use.
"""

from tpoverlap.gemm.triton.availability import kernels_missing, require_kernels
from tpoverlap.gemm.triton.tile_plan import PieceRows, RowBlock, TilePlan
from tpoverlap.gemm.triton.tiles import TileShape, choose_tile

__all__ = [
    "PieceRows",
    "RowBlock",
    "TilePlan",
    "TileShape",
    "choose_tile",
    "kernels_missing",
    "require_kernels",
]
