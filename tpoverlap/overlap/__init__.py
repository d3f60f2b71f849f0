"""THE METHODS: how an exchange and a GEMM task are joined on streams. One file a method; `registry` names them."""

from tpoverlap.overlap.context import OperationContext
from tpoverlap.overlap.registry import (
    gather_beside,
    gather_then_gemm,
    gemm_then_scatter,
    open_gather,
    scatter_beside,
)

__all__ = [
    "OperationContext",
    "gather_beside",
    "gather_then_gemm",
    "gemm_then_scatter",
    "open_gather",
    "scatter_beside",
]
