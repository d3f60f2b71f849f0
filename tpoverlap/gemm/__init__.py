"""HOW TILES MULTIPLY: GEMM tasks that compute any rows or columns into any output. Knows no transport."""

from tpoverlap.gemm.tasks import PartialGemm, RowGemm, weight_grad

__all__ = ["PartialGemm", "RowGemm", "weight_grad"]
