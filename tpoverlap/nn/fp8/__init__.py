"""FP8 twins of the linear layers' autograd functions."""

from tpoverlap.nn.fp8.checks import require_fp8_gemm, require_unquantised
from tpoverlap.nn.fp8.column import Fp8ColumnLinear
from tpoverlap.nn.fp8.row import Fp8RowLinear
from tpoverlap.nn.fp8.whole import Fp8ColumnWhole, Fp8RowWhole

__all__ = [
    "Fp8ColumnLinear",
    "Fp8ColumnWhole",
    "Fp8RowLinear",
    "Fp8RowWhole",
    "require_fp8_gemm",
    "require_unquantised",
]
