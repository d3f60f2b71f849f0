"""Tensors as FP8 bytes and float32 scales: ``x ~ data * scale``. Deterministic, no host synchronisation.

A GPU runs the Triton kernels of `tpoverlap.gemm.fp8.kernels`, a CPU their twins of `tpoverlap.gemm.fp8.plain`, with
first lines state the rules for zeros, for numbers beyond the range, and for what is not finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from tpoverlap.gemm.fp8 import plain
from tpoverlap.gemm.fp8.kernels.launch import KernelOperations
from tpoverlap.gemm.fp8.plain import ALIGNMENT, SCALE_BYTES, PlainOperations
from tpoverlap.gemm.fp8.scale_rule import ScaleRule

__all__ = [
    "ALIGNMENT",
    "SCALE_BYTES",
    "QuantizedTensor",
    "operations_on",
    "pack_rows",
    "quantize",
    "quantize_by_maxima",
    "quantize_local",
    "quantize_rows",
    "scale_of",
    "tensor_amax",
    "tensor_maxima",
    "transposed_bytes",
    "unpack_rows",
]


@lru_cache(maxsize=64)
def operations_on(device: torch.device) -> PlainOperations | KernelOperations:
    """What runs on ``device``.

    Raises:
        BackendUnavailableError: a GPU on which Triton kernels do not run.
    """
    return KernelOperations(device) if device.type == "cuda" else PlainOperations()


@dataclass(slots=True, eq=False)
class QuantizedTensor:
    """A [rows, columns] tensor in FP8. Nobody changes one; that it were frozen would cost each one a call a field.

    Attributes:
        data: float8, [rows, columns], contiguous.
        scale: float32, what data is multiplied with: [1, 1], or [rows, 1] for row-wise scaling.
        dtype: of the original.
        columns: the transposed copy, if it was made along: float8 [columns, rows rounded up to a multiple of 16], with
            zeros at the end.
    """

    data: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype
    columns: torch.Tensor | None = None

    @property
    def bytes(self) -> torch.Tensor:
        """``data`` as uint8: what is communicated."""
        return self.data.view(torch.uint8)

    @property
    def is_rowwise(self) -> bool:
        """Whether every row has its own scale. (A row-wise tensor of one row is the same as a per-tensor one.)"""
        return self.scale.shape[0] != 1

    def rows(self, rows: slice) -> QuantizedTensor:
        """Some of the rows, without a copy."""
        return QuantizedTensor(self.data[rows], self.scale[rows] if self.is_rowwise else self.scale, self.dtype)

    def dequantize(self) -> torch.Tensor:
        """[rows, columns] in the original dtype, rounded once."""
        return operations_on(self.data.device).dequantize(self.data, self.scale, self.dtype)

    def padded_transposed(self) -> QuantizedTensor:
        """[columns, T16]: the rows rounded up to a multiple of 16 with zeros, since they are the K of wgrad's GEMM.

        Per-tensor scales only: others would sit on columns.
        """
        return QuantizedTensor(self._columns(), self.scale, self.dtype)

    def transposed(self) -> QuantizedTensor:
        """The transposed tensor, its bytes contiguous. Of a weight, whose rows are a multiple of 16, nothing is cut."""
        columns, num_rows = self._columns(), self.data.shape[0]
        if columns.shape[1] != num_rows:
            columns = columns[:, :num_rows].contiguous()
        return QuantizedTensor(columns, self.scale, self.dtype)

    def _columns(self) -> torch.Tensor:
        if self.columns is not None:
            return self.columns
        assert self.scale.numel() == 1, "row-wise scales do not survive a transposition"
        return transposed_bytes(self.data, self.data.dtype)


def transposed_bytes(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP8 numbers of format ``dtype``, as such or as uint8, [rows, columns] -> float8 [columns, T16], see above."""
    return operations_on(data.device).transpose(data, dtype)


def tensor_maxima(x: torch.Tensor, *, shared: bool = False) -> torch.Tensor:
    """Largest magnitudes of parts that cover ``x``: float32 [n, 1], n >= 1; NaN where there is one.

    ``shared``: n depends on the device alone, so ranks can exchange them.
    """
    return operations_on(x.device).maxima(x, shared=shared)


def tensor_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude, float32 [1, 1]; 0 for an empty tensor; NaN if there is one."""
    maxima = tensor_maxima(x)
    return maxima if maxima.shape[0] == 1 else maxima.amax(0, keepdim=True)


def scale_of(
    amax: torch.Tensor, dtype: torch.dtype, *, margin: int = 0, power_of_2: bool = False, epsilon: float = 0.0
) -> torch.Tensor:
    """The scale that maps magnitude ``amax`` (float32, any shape) onto the format's largest number. See `ScaleRule`."""
    return plain.scale_of(amax, ScaleRule(dtype, margin, power_of_2, epsilon))


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, transposes: bool = False) -> QuantizedTensor:
    """``x`` [rows, columns] in format ``dtype`` under ``scale`` [1, 1]; with its transposed copy if asked for."""
    assert scale.numel() == 1, "row-wise scales come from quantize_rows"
    data, columns = operations_on(x.device).quantize(x, scale, dtype, transposes)
    return QuantizedTensor(data, scale, x.dtype, columns)


def quantize_by_maxima(
    x: torch.Tensor, maxima: torch.Tensor, rule: ScaleRule, *, transposes: bool = False
) -> QuantizedTensor:
    """``x`` [rows, columns] under the scale of the largest of ``maxima``: its own, or those of all ranks."""
    data, columns, scale = operations_on(x.device).quantize_by_maxima(x, maxima, rule, transposes)
    return QuantizedTensor(data, scale, x.dtype, columns)


def quantize_local(x: torch.Tensor, rule: ScaleRule, *, transposes: bool = False) -> QuantizedTensor:
    """``x`` [rows, columns] under a scale of its own: `quantize_by_maxima` of its `tensor_maxima`."""
    data, columns, scale = operations_on(x.device).quantize_local(x, rule, transposes)
    return QuantizedTensor(data, scale, x.dtype, columns)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> QuantizedTensor:
    """``x`` [rows, columns], each row under its own scale."""
    data, scale = operations_on(x.device).quantize_rows(x, dtype)
    return QuantizedTensor(data, scale, x.dtype)


def pack_rows(x: torch.Tensor, dtype: torch.dtype, out: torch.Tensor) -> None:
    """``x`` [rows, N] into ``out`` uint8 [rows, N + 4]: FP8 bytes, then the row's own float32 scale.

    So a row that travels needs nothing beside it. N must be a multiple of 4.
    """
    operations_on(x.device).pack_rows(x, dtype, out)


def unpack_rows(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32 [rows, N] from what `pack_rows` wrote."""
    return operations_on(packed.device).unpack_rows(packed, dtype)
