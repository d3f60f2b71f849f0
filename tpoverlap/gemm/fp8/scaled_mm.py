"""One scaled FP8 GEMM: tensor cores on the GPU, the same numbers in float32 on the CPU.

Tensor cores read both operands along K, so the second one is a transposed view of a contiguous [N, K]: of a weight as
it is stored. Backward needs the other orientation and takes transposed copies (`QuantizedTensor.transposed`).

How tensor cores accumulate: ``torch._scaled_mm``'s fast mode keeps partial sums in the tensor cores' own registers; the
other one adds them up in float32 every few steps (Transformer Engine's "split accumulator").

==========  =======================================  ===================================================
GEMM        per-tensor scales                        row-wise scales
==========  =======================================  ===================================================
fprop       fast for bfloat16 results, else float32  fast
dgrad       float32                                  fast
wgrad       float32                                  not in FP8
==========  =======================================  ===================================================

The kernels of `fused` follow the same table: see `tpoverlap.gemm.triton.products`.

The first column is Transformer Engine's choice, the second one torchao's: on Hopper torch hands row-wise scales to
cuBLASLt (CUTLASS only before CUDA 12.9 or on other architectures), which takes them in the fast mode and without a
bias, and answers CUBLAS_STATUS_NOT_SUPPORTED to the rest.
"""

from __future__ import annotations

import torch

from tpoverlap.errors import ActiveShapeError, ConfigError
from tpoverlap.gemm.cublaslt import lt_products
from tpoverlap.gemm.fp8.plain import ALIGNMENT
from tpoverlap.gemm.triton import kernels_missing


def scaled_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    left_scale: torch.Tensor,
    right_scale: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    addend: torch.Tensor | None = None,
    fast_accumulation: bool = False,
) -> None:
    """``out[:] = (left * left_scale) @ (right * right_scale.T) + bias + addend``, accumulated in float32, rounded once.

    On a GPU row-wise products, and those that only torch can do (see `tpoverlap.gemm.cublaslt`), are rounded before
    ``addend`` is added.

    Args:
        left: float8 [M, K]; M may be anything.
        right: float8 [K, N], a transposed view of a contiguous [N, K], in the same or the other format (not both E5M2
            on the GPU).
        left_scale, right_scale: float32, [1, 1] both, or [M, 1] and [N, 1].
        out: [M, N], contiguous rows; bfloat16, float16 or float32.
        bias: [N] in the dtype of ``out``.
        addend: [M, N] in the dtype of ``out``, dense rows; may be ``out``.
        fast_accumulation: let tensor cores add in less than float32, where the table above leaves a choice.
    """
    if left.shape[0] == 0:
        return
    if left.device.type != "cuda":
        _reference(left, right, left_scale, right_scale, out, bias, addend)
        return
    rowwise = left_scale.numel() != 1 or right_scale.numel() != 1
    fast = accumulates_fast(out.dtype, is_rowwise=rowwise, wanted=fast_accumulation)
    if not rowwise:
        products = lt_products(left.get_device())
        scales = left_scale, right_scale
        if products is not None and products.multiply(left, right, out, addend, bias, scales, fast=fast):
            return
    if rowwise:  # both kinds alike
        left_scale = _vector(left_scale, left.shape[0])
        right_scale = _vector(right_scale, right.shape[1]).t()
    fused_bias = None if rowwise or out.dtype == torch.float32 else bias  # neither has a bias epilogue
    product = torch.empty_like(out) if addend is out else out
    torch._scaled_mm(
        left,
        right,
        scale_a=left_scale,
        scale_b=right_scale,
        bias=fused_bias,
        out_dtype=out.dtype,
        use_fast_accum=fast,
        out=product,
    )
    if bias is not None and fused_bias is None:
        product.add_(bias)
    if addend is not None:
        torch.add(addend, product, out=out)


def accumulates_fast(dtype: torch.dtype, *, is_rowwise: bool, wanted: bool) -> bool:
    """The table above: whether tensor cores keep a product's sums that is rounded to ``dtype``."""
    return is_rowwise or (wanted and dtype == torch.bfloat16)  # it costs more digits than other dtypes round off


def _vector(scale: torch.Tensor, length: int) -> torch.Tensor:
    """``scale`` as [length, 1], contiguous, from 16 bytes on: chunks of rows start anywhere."""
    scale = scale.expand(length, 1).contiguous()
    return scale if scale.data_ptr() % 16 == 0 else scale.clone()


def _reference(
    left: torch.Tensor,
    right: torch.Tensor,
    left_scale: torch.Tensor,
    right_scale: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    addend: torch.Tensor | None,
) -> None:
    product = torch.mm(left.float(), right.float()).mul_(left_scale * right_scale.t())
    for summand in (bias, addend):
        if summand is not None:
            product.add_(summand)
    out.copy_(product)


def require_features(name: str, what: str, *sizes: int) -> None:
    """Raise ActiveShapeError unless every size suits FP8 tensor cores. On a CPU too, so that a laptop finds it."""
    for size in sizes:
        if size % ALIGNMENT:
            raise ActiveShapeError(
                f"{name}: {what} {size} is not a multiple of {ALIGNMENT}, which FP8 GEMMs need on each rank; pad the "
                f"feature size to {-(-size // ALIGNMENT) * ALIGNMENT}, or run this layer without fp8"
            )


def require_device(device: torch.device) -> None:
    """Raise ConfigError unless the device has FP8 tensor cores and runs Triton kernels, or is a CPU (which computes the
    same in float32).
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        major, minor = torch.cuda.get_device_capability(device)
        raise ConfigError(
            f"FP8 is not supported on {device}, a {torch.cuda.get_device_name(device)} of compute capability "
            f"{major}.{minor}: its tensor cores need 8.9 or later; use quantization_modes=[NONE]"
        )
    missing = kernels_missing(device) if device.type == "cuda" else None
    if missing is not None:
        raise ConfigError(f"FP8 on {device} needs Triton kernels: {missing}, or use quantization_modes=[NONE]")


def require_output_dtype(name: str, dtype: torch.dtype, device: torch.device, *, rowwise: bool) -> None:
    """Raise ConfigError where row-wise GEMMs cannot write ``dtype`` (on the GPU they write bfloat16 only)."""
    if rowwise and device.type == "cuda" and dtype != torch.bfloat16:
        raise ConfigError(
            f"{name}: row-wise scaled FP8 GEMMs write bfloat16 on the GPU, and the manager has {dtype}; use a bfloat16 "
            "manager, or a per-tensor recipe (Float8CurrentScaling, DelayedScaling)"
        )
