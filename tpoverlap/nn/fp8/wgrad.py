"""The weight gradient of FP8 layers: dW [N, K] = dy^T x."""

from __future__ import annotations

import torch

from tpoverlap.gemm import weight_grad
from tpoverlap.gemm.fp8 import QuantizedTensor, scaled_weight_grad
from tpoverlap.gemm.fp8.quantize import transposed_bytes


class WgradOperand:
    """dy or x, [T, width], as wgrad reads it. Made when it is first needed, once for all GEMMs that share it.

    Args:
        tensor: the tensor; None if only its columns were kept.
        columns: [width, T16] in FP8, what `QuantizedTensor.padded_transposed` makes, if there already.
    """

    def __init__(self, tensor: QuantizedTensor | None, columns: QuantizedTensor | None = None) -> None:
        self._tensor, self._columns = tensor, columns
        self._wide: torch.Tensor | None = None

    @property
    def columns(self) -> QuantizedTensor:
        """[width, T16] in FP8."""
        if self._columns is None:
            assert self._tensor is not None, "one of them was given"
            self._columns = self._tensor.padded_transposed()
        return self._columns

    @property
    def wide(self) -> torch.Tensor:
        """[T, width] in the original dtype."""
        if self._wide is None:
            assert self._tensor is not None, "row-wise tensors are kept whole"
            self._wide = self._tensor.dequantize()
        return self._wide


class GatheredOperand(WgradOperand):
    """The same from rows as they were gathered: no view of them is made that only a launch by address would read.

    Args:
        gathered: uint8 [T, width].
        dtype: the FP8 format.
        scale: float32 [1, 1], or [T, 1].
        wide_dtype: the original dtype.
    """

    def __init__(
        self, gathered: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor, wide_dtype: torch.dtype
    ) -> None:
        self._tensor = self._columns = self._wide = None  # not by a call
        self._gathered, self._dtype, self._scale, self._wide_dtype = gathered, dtype, scale, wide_dtype

    @property
    def columns(self) -> QuantizedTensor:
        """[width, T16] in FP8."""
        if self._columns is None:
            assert self._scale.numel() == 1, "row-wise scales do not survive a transposition"
            made = transposed_bytes(self._gathered, self._dtype)
            self._columns = QuantizedTensor(made, self._scale, self._wide_dtype)
        return self._columns

    @property
    def wide(self) -> torch.Tensor:
        """[T, width] in the original dtype."""
        if self._tensor is None:
            self._tensor = QuantizedTensor(self._gathered.view(self._dtype), self._scale, self._wide_dtype)
        return super().wide


def fp8_weight_grad(output_grad: WgradOperand, x: WgradOperand, rowwise: bool) -> torch.Tensor:
    """Per-tensor scales: an FP8 GEMM over T rounded up to 16. Row-wise scales do not leave that sum: original dtype."""
    if rowwise:
        return weight_grad(output_grad.wide, x.wide)
    dy_t, x_t = output_grad.columns, x.columns
    out = x_t.data.new_empty(dy_t.data.shape[0], x_t.data.shape[0], dtype=x_t.dtype)
    scaled_weight_grad(dy_t, x_t, out)
    return out
