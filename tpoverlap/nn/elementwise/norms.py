"""LayerNorm and RMSNorm of rows, forward and backward in one pass over the data each.

========  ==========================================================  ================================================
          computes                                                    shapes
========  ==========================================================  ================================================
forward   y = (x - mean) rstd scale + bias (RMSNorm: no mean, bias)   [T_r,H], [H], [H] -> [T_r,H]; float32 [T_r] saved
backward  dx, dweight, dbias                                          [T_r,H] -> [T_r,H], [H], [H]
========  ==========================================================  ================================================

scale is the weight, or 1 + weight. Torch's norms are single kernels forward; backward they read dy and x for dx, and
again for the weight's gradient. They cost the host less, so small inputs stay with them: see `pays`.
The sum over rows has an order that depends on T_r alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tpoverlap.nn.elementwise.launch import DirectKernel, runs_kernels, vector_unit

_MOST_FEATURES: Final = 8192
"""A row has to fit into a program's registers, twice and with its sums."""
_LEAST_ELEMENTS: Final = 1 << 22
"""Below, a kernel takes less time than its launch from Python."""
_PROGRAMS_PER_MULTIPROCESSOR: Final = 4
_INTERPRETED_PROGRAMS: Final = 3
_ROWS, _COLUMNS = 64, 32


class NormKind(NamedTuple):
    """Which norm."""

    centred: bool
    """LayerNorm, which has a bias; else RMSNorm."""
    zero_centered: bool
    """The scale is 1 + weight."""
    eps: float


def pays(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels should run: they can, ``x`` [T_r, H] is large, and no autocast wants torch's other dtype."""
    return (
        x.numel() >= _LEAST_ELEMENTS
        and runs_kernels(x)
        and x.dim() == 2
        and x.shape[1] <= _MOST_FEATURES
        and x.stride(1) == 1
        and weight.dtype == x.dtype
        and weight.is_contiguous()
        and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
        and not torch.is_autocast_enabled(x.device.type)
    )


def norm_twin(x: Tensor, weight: Tensor, bias: Tensor | None, kind: NormKind) -> Tensor:
    """The norm in plain torch, differentiable."""
    scale = weight + 1 if kind.zero_centered else weight
    if kind.centred:
        return F.layer_norm(x, (x.shape[-1],), scale, bias, kind.eps)
    return F.rms_norm(x, (x.shape[-1],), scale, kind.eps)


def norm_forward(x: Tensor, weight: Tensor, bias: Tensor | None, kind: NormKind) -> tuple[Tensor, Tensor, Tensor]:
    """(y [T_r, H] contiguous, mean, rstd: float32 [T_r]) by the kernel; RMSNorm has no mean: it is rstd again."""
    (rows, width), pitch = x.shape, x.stride(0)
    y = x.new_empty(rows, width)
    rstd = x.new_empty(rows, dtype=torch.float32)
    mean = x.new_empty(rows, dtype=torch.float32) if kind.centred else rstd  # where the kernel reads no mean
    unit = vector_unit(width, pitch)
    block, num_warps = _block(width)
    _kernels(num_warps)[0].launch(
        rows,
        (x, weight, weight if bias is None else bias, y, mean, rstd),
        (width // unit, pitch // unit),
        (kind.eps, kind.centred, kind.zero_centered, unit, block),
    )
    return y, mean, rstd


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, kind: NormKind, *, needs_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dx [T_r, H] contiguous, dweight, dbias): the last two in the weight's dtype, and None unless needed or there."""
    (rows, width), pitch = x.shape, x.stride(0)
    dy_pitch, step = dy.stride()
    if step != 1:
        dy = dy.contiguous()
        dy_pitch = dy.stride(0)
    dx = x.new_empty(rows, width)
    programs = min(rows, _most_programs(x.device))
    parts = width * (2 if kind.centred else 1)
    partial = x.new_empty(programs if needs_weight else 0, parts, dtype=torch.float32)
    unit = vector_unit(width, pitch, dy_pitch)
    block, num_warps = _block(width)
    _, backward, add_partials = _kernels(num_warps)
    backward.launch(
        programs,
        (x, weight, dy, dx, mean, rstd, partial),
        (rows, width // unit, pitch // unit, dy_pitch // unit),
        (kind.centred, kind.zero_centered, needs_weight, unit, block),
    )
    if not needs_weight:
        return dx, None, None
    sums = weight.new_empty(parts)
    add_partials.launch(-(-parts // _COLUMNS), (sums, partial), (programs, parts), (_ROWS, _COLUMNS))
    return (dx, sums[:width], sums[width:]) if kind.centred else (dx, sums, None)


@lru_cache(maxsize=64)
def _block(width: int) -> tuple[int, int]:
    """(the power of two that holds a row, warps of a program): at most 16 elements a thread."""
    block = max(16, 1 << (width - 1).bit_length())
    return block, max(4, min(16, block // 512))


@lru_cache(maxsize=16)
def _most_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return _PROGRAMS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=8)
def _kernels(num_warps: int) -> tuple[DirectKernel, DirectKernel, DirectKernel]:
    from tpoverlap.nn.elementwise import norm_kernels

    return (
        DirectKernel(norm_kernels.norm_forward, num_warps),
        DirectKernel(norm_kernels.norm_backward, num_warps),
        DirectKernel(norm_kernels.add_partials, 4),
    )
