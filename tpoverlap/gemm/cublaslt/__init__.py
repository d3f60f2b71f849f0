"""Products by cublasLt without torch in between. See `tpoverlap.gemm.cublaslt.products`."""

from tpoverlap.gemm.cublaslt.products import LtProducts, lt_products

__all__ = ["LtProducts", "lt_products"]
