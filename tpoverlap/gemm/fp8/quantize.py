"""Tensors as FP8 bytes and float32 scales: ``x ~ data * scale``. Plain torch, deterministic, no host synchronisation.

Rules, on every device alike:

- zeros, and a shard without rows, have magnitude 0; the scale is then 1;
- a finite value beyond the format's range saturates (delayed scaling can meet one);
- whatever is not finite becomes NaN, so that an overflow upstream stays visible; a tensor that holds one has scale 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_TINY = torch.finfo(torch.float32).tiny
_HUGE = torch.finfo(torch.float32).max
ALIGNMENT = 16
"""FP8 tensor cores want both feature sizes of a GEMM in multiples of this."""
SCALE_BYTES = 4


@dataclass(frozen=True)
class QuantizedTensor:
    """A [rows, columns] tensor in FP8.

    Attributes:
        data: float8, [rows, columns], contiguous.
        scale: float32, what data is multiplied with: [1, 1], or [rows, 1] for row-wise scaling.
        dtype: of the original.
    """

    data: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype

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
        return (self.data.float() * self.scale).to(self.dtype)

    def transposed(self) -> QuantizedTensor:
        """The transposed tensor, its bytes contiguous again. Per-tensor scales only: others would sit on columns."""
        assert self.scale.numel() == 1, "row-wise scales do not survive a transposition"
        return QuantizedTensor(self.bytes.t().contiguous().view(self.data.dtype), self.scale, self.dtype)


def tensor_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude, float32 [1, 1]; 0 for an empty tensor; NaN if there is one."""
    if x.numel() == 0:
        return x.new_zeros(1, 1, dtype=torch.float32)
    low, high = torch.aminmax(x)  # one pass, no temporary
    return torch.maximum(high, low.neg()).float().reshape(1, 1)


def row_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each row, float32 [rows, 1]."""
    if x.numel() == 0:
        return x.new_zeros(x.shape[0], 1, dtype=torch.float32)
    low, high = torch.aminmax(x, dim=1, keepdim=True)
    return torch.maximum(high, low.neg()).float()


def scale_of(
    amax: torch.Tensor, dtype: torch.dtype, *, margin: int = 0, power_of_2: bool = False, epsilon: float = 0.0
) -> torch.Tensor:
    """The scale that maps magnitude ``amax`` (float32, any shape) onto the format's largest number.

    Args:
        amax: magnitudes; one that is 0 or not finite has scale 1.
        dtype: the FP8 format.
        margin: leave ``2**margin`` of headroom.
        power_of_2: round up to a power of two.
        epsilon: magnitudes below it count as this much.
    """
    if epsilon > 0:
        amax = amax.clamp(min=epsilon)
    scale = amax * (2.0**margin / torch.finfo(dtype).max)
    if power_of_2:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
    usable = torch.isfinite(amax) & (amax > 0)
    return torch.where(usable, scale.clamp(_TINY, _HUGE), torch.ones_like(scale))


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> QuantizedTensor:
    """``x`` [rows, columns] in format ``dtype`` under ``scale`` ([1, 1] or [rows, 1])."""
    most = torch.finfo(dtype).max
    x = x.contiguous()  # or the bytes would inherit its strides
    scaled = (x.float() / scale).clamp_(-most, most)
    scaled.add_(x - x)  # 0, but NaN where x is infinite or NaN: torch would saturate an infinity
    return QuantizedTensor(scaled.to(dtype), scale, x.dtype)


def pack_rows(x: torch.Tensor, dtype: torch.dtype, out: torch.Tensor) -> None:
    """``x`` [rows, N] into ``out`` uint8 [rows, N + 4]: FP8 bytes, then the row's own float32 scale.

    So a row that travels needs nothing beside it. N must be a multiple of 4.
    """
    width = x.shape[1]
    quantised = quantize(x, scale_of(row_amax(x), dtype), dtype)
    out[:, :width].copy_(quantised.bytes)
    out[:, width:].copy_(quantised.scale.view(torch.uint8))


def unpack_rows(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32 [rows, N] from what `pack_rows` wrote."""
    width = packed.shape[1] - SCALE_BYTES
    # Contiguous copies: the scale of a strided view may not lie on a multiple of 4 bytes.
    scale = packed[:, width:].contiguous().view(torch.float32)
    rows: torch.Tensor = packed[:, :width].view(dtype).float()
    return rows.mul_(scale)
