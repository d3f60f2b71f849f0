"""THE METHODS: how an exchange and a GEMM task are joined on streams. One file a method; `registry` names them."""

from tpoverlap.overlap.context import OperationContext, possible_labels
from tpoverlap.overlap.registry import (
    GATHER_METHODS,
    SCATTER_METHODS,
    gather_beside,
    gather_then_gemm,
    gemm_then_scatter,
    open_gather,
    scatter_beside,
)

__all__ = [
    "GATHER_METHODS",
    "SCATTER_METHODS",
    "OperationContext",
    "gather_beside",
    "gather_then_gemm",
    "gemm_then_scatter",
    "open_gather",
    "possible_labels",
    "scatter_beside",
]
