"""Spawned ranks, named shapes and tolerances: what tests and benchmarks of tpoverlap, and of code on it, share."""

from tpoverlap.testing import faults
from tpoverlap.testing.failure import RankError, RankFailure
from tpoverlap.testing.numeric import assert_close_to_twin, assert_elementwise, relative_error
from tpoverlap.testing.pool import RankPool
from tpoverlap.testing.ranks import run_ranks
from tpoverlap.testing.specs import (
    CPU_SHAPES,
    GEMM_SHAPES,
    TP8_SHAPES,
    GemmShape,
    random_walk,
    token_counts,
    uneven_partitions,
)

__all__ = [
    "CPU_SHAPES",
    "GEMM_SHAPES",
    "TP8_SHAPES",
    "GemmShape",
    "RankError",
    "RankFailure",
    "RankPool",
    "assert_close_to_twin",
    "assert_elementwise",
    "faults",
    "random_walk",
    "relative_error",
    "run_ranks",
    "token_counts",
    "uneven_partitions",
]
