"""FP8 twins of the linear layers' autograd functions, and the context that switches them on."""

from tpoverlap.nn.fp8.autocast import autocast_recipe, fp8_autocast
from tpoverlap.nn.fp8.checks import require_fp8_gemm
from tpoverlap.nn.fp8.column import Fp8ColumnLinear
from tpoverlap.nn.fp8.row import Fp8RowLinear

__all__ = ["Fp8ColumnLinear", "Fp8RowLinear", "autocast_recipe", "fp8_autocast", "require_fp8_gemm"]
