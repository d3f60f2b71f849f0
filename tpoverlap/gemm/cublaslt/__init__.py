"""Products by cublasLt without torch in between. See `tpoverlap.gemm.cublaslt.products`."""

from tpoverlap.gemm.cublaslt.family import ALIGNMENT_BYTES
from tpoverlap.gemm.cublaslt.products import LtProducts, lt_products

__all__ = ["ALIGNMENT_BYTES", "LtProducts", "lt_products"]
