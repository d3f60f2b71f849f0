"""FP8 twins of the linear layers' autograd functions, and the context that switches them on."""

from tpoverlap.nn.fp8.autocast import as_noted, autocast_recipe, fp8_autocast, note_autocast, state_of
from tpoverlap.nn.fp8.checks import require_fp8_gemm, require_unquantised
from tpoverlap.nn.fp8.column import Fp8ColumnLinear
from tpoverlap.nn.fp8.row import Fp8RowLinear

__all__ = [
    "Fp8ColumnLinear",
    "Fp8RowLinear",
    "as_noted",
    "autocast_recipe",
    "fp8_autocast",
    "note_autocast",
    "require_fp8_gemm",
    "require_unquantised",
    "state_of",
]
