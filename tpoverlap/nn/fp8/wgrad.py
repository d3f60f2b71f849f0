"""The weight gradient of FP8 layers: dW [N, K] = dy^T x."""

from __future__ import annotations

import torch

from tpoverlap.gemm import weight_grad
from tpoverlap.gemm.fp8 import QuantizedTensor, scaled_weight_grad


class WgradOperand:
    """dy or x, [T, width], as wgrad reads it. Made when it is first needed, once for all GEMMs that share it."""

    def __init__(self, tensor: QuantizedTensor) -> None:
        self.tensor = tensor
        self._transposed: QuantizedTensor | None = None
        self._wide: torch.Tensor | None = None

    @property
    def transposed(self) -> QuantizedTensor:
        """[width, T16] in FP8."""
        if self._transposed is None:
            self._transposed = self.tensor.padded_transposed()
        return self._transposed

    @property
    def wide(self) -> torch.Tensor:
        """[T, width] in the original dtype."""
        if self._wide is None:
            self._wide = self.tensor.dequantize()
        return self._wide


def fp8_weight_grad(output_grad: WgradOperand, x: WgradOperand, rowwise: bool) -> torch.Tensor:
    """Per-tensor scales: an FP8 GEMM over T rounded up to 16. Row-wise scales do not leave that sum: original dtype."""
    if rowwise:
        return weight_grad(output_grad.wide, x.wide)
    num_rows, num_columns = output_grad.tensor.data.shape[1], x.tensor.data.shape[1]
    out = x.tensor.data.new_empty(num_rows, num_columns, dtype=x.tensor.dtype)
    scaled_weight_grad(output_grad.transposed, x.transposed, out)
    return out
