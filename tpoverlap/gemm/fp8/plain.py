"""Quantisation in plain torch: what CPUs run, and the twin of every kernel in `tpoverlap.gemm.fp8.kernels`.

Rules, on every device alike:

- zeros, and a shard without rows, have magnitude 0; the scale is then 1;
- numbers are multiplied with the scale's reciprocal, rounded to float32 once before and once after (a division costs a
  kernel more than reading its operands);
- a finite value beyond the format's range saturates (delayed scaling can meet one);
- whatever is not finite becomes NaN, so that an overflow upstream stays visible; a tensor that holds one has scale 1.
"""

from __future__ import annotations

import torch

from tpoverlap.gemm.fp8.scale_rule import ScaleRule

_TINY = torch.finfo(torch.float32).tiny
_HUGE = torch.finfo(torch.float32).max
ALIGNMENT = 16
"""FP8 tensor cores want both feature sizes of a GEMM in multiples of this."""
SCALE_BYTES = 4
MOST_MAXIMA = 512
"""Parts that a tensor's magnitude is measured in, at most; every quantising program reads them all."""


def padded(num_rows: int) -> int:
    """``num_rows`` rounded up to a multiple of 16."""
    return -(-num_rows // ALIGNMENT) * ALIGNMENT


def scale_of(amax: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    """The scale for magnitudes ``amax`` (float32, any shape); one that is 0 or not finite has scale 1."""
    if rule.epsilon > 0:
        amax = amax.clamp(min=rule.epsilon)
    scale = (amax * rule.factor).clamp_(min=_TINY)  # a power of two
    if rule.power_of_2:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
    usable = torch.isfinite(amax) & (amax > 0)
    return torch.where(usable, scale.clamp(_TINY, _HUGE), torch.ones_like(scale))


class PlainOperations:
    """The operations, see the rules above. ``x`` is [rows, columns] in float32, bfloat16 or float16.

    Attributes:
        shared_parts: how many magnitudes of a tensor ranks exchange: the same for every tensor, 2 KiB at most.
    """

    shared_parts = 1

    def maxima(self, x: torch.Tensor, *, shared: bool = False) -> torch.Tensor:
        """Largest magnitudes of parts of ``x`` that cover it: float32 [n, 1], n >= 1; NaN where there is one.

        ``shared``: n is `shared_parts`, whatever ``x`` is.
        """
        if x.numel() == 0:
            return x.new_zeros(1, 1, dtype=torch.float32)
        low, high = torch.aminmax(x)  # one pass, no temporary
        return torch.maximum(high, low.neg()).float().reshape(1, 1)

    def quantize_by_maxima(
        self, x: torch.Tensor, maxima: torch.Tensor, rule: ScaleRule, transposes: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """``x`` under the scale [1, 1] of the largest of ``maxima``: what `quantize` returns, and that scale."""
        scale = scale_of(maxima.amax().reshape(1, 1), rule)
        return *self.quantize(x, scale, rule.dtype, transposes), scale

    def quantize_local(
        self, x: torch.Tensor, rule: ScaleRule, transposes: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """As `quantize_by_maxima`, by the magnitudes of ``x`` itself."""
        return self.quantize_by_maxima(x, self.maxima(x), rule, transposes)

    def quantize(
        self, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, transposes: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``x`` under ``scale`` [1, 1]: float8 [rows, columns] and, if asked for, `transpose` of it."""
        data = _quantized(x, scale, dtype)
        return data, self.transpose(data) if transposes else None

    def transpose(self, data: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Float8 [rows, columns] as [columns, rows rounded up to a multiple of 16], padded with zeros, contiguous.

        ``dtype``: the format, of bytes that come as uint8.
        """
        num_rows, width = data.shape
        made = data.new_empty(width, padded(num_rows), dtype=torch.uint8)
        made[:, :num_rows].copy_(data.view(torch.uint8).t())
        made[:, num_rows:].zero_()
        return made.view(data.dtype if dtype is None else dtype)

    def quantize_rows(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row under its own scale: float8 [rows, columns], scales [rows, 1]."""
        scale = scale_of(_row_maxima(x), ScaleRule(dtype))
        return _quantized(x, scale, dtype), scale

    def pack_rows(self, x: torch.Tensor, dtype: torch.dtype, out: torch.Tensor) -> None:
        """`quantize_rows` into ``out`` uint8 [rows, columns + 4]: each row's bytes, then its scale."""
        width = x.shape[1]
        data, scale = self.quantize_rows(x, dtype)
        out[:, :width].copy_(data.view(torch.uint8))
        out[:, width:].copy_(scale.view(torch.uint8))

    def unpack_rows(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Float32 [rows, columns] from what `pack_rows` wrote."""
        width = packed.shape[1] - SCALE_BYTES
        # Contiguous copies: the scale of a strided view may not lie on a multiple of 4 bytes.
        scale = packed[:, width:].contiguous().view(torch.float32)
        rows: torch.Tensor = packed[:, :width].view(dtype).float()
        return rows.mul_(scale)

    def dequantize(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Float8 ``data`` [rows, columns] times ``scale`` ([1, 1] or [rows, 1]) in ``dtype``, rounded once."""
        return (data.float() * scale).to(dtype)


def _row_maxima(x: torch.Tensor) -> torch.Tensor:
    if x.numel() == 0:
        return x.new_zeros(x.shape[0], 1, dtype=torch.float32)
    low, high = torch.aminmax(x, dim=1, keepdim=True)
    return torch.maximum(high, low.neg()).float()


def _quantized(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    most = torch.finfo(dtype).max
    x = x.contiguous()  # or the bytes would inherit its strides
    scaled = (x.float() * scale.reciprocal()).clamp_(-most, most)
    scaled.masked_fill_(~torch.isfinite(x), float("nan"))  # torch would saturate an infinity
    return scaled.to(dtype)
