"""FP8: recipes and scales, quantised tensors, scaled GEMMs. Knows no transport: who gathers exchanges magnitudes."""

from tpoverlap.gemm.fp8.plain import MOST_MAXIMA
from tpoverlap.gemm.fp8.quantize import (
    SCALE_BYTES,
    QuantizedTensor,
    pack_rows,
    quantize,
    quantize_by_maxima,
    quantize_rows,
    scale_of,
    unpack_rows,
)
from tpoverlap.gemm.fp8.quantizer import Quantizer
from tpoverlap.gemm.fp8.recipes import DelayedScaling, Float8CurrentScaling, Float8RowwiseScaling, Format, Recipe
from tpoverlap.gemm.fp8.scale_rule import ScaleRule
from tpoverlap.gemm.fp8.scaled_mm import require_device, require_features, require_output_dtype, scaled_mm
from tpoverlap.gemm.fp8.scaled_tasks import (
    PackedPartialGemm,
    ScaledPartialGemm,
    ScaledRowGemm,
    scaled_weight_grad,
)
from tpoverlap.gemm.fp8.state import Fp8State, QuantizedWeight

__all__ = [
    "MOST_MAXIMA",
    "SCALE_BYTES",
    "DelayedScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "Fp8State",
    "PackedPartialGemm",
    "QuantizedTensor",
    "QuantizedWeight",
    "Quantizer",
    "Recipe",
    "ScaleRule",
    "ScaledPartialGemm",
    "ScaledRowGemm",
    "pack_rows",
    "quantize",
    "quantize_by_maxima",
    "quantize_rows",
    "require_device",
    "require_features",
    "require_output_dtype",
    "scale_of",
    "scaled_mm",
    "scaled_weight_grad",
    "unpack_rows",
]
