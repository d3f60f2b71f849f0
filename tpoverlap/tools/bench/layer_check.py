"""Overlapped layers against the non-overlapped twin, output and every gradient, before anything is timed.

Both have the same operands and the same dtype. What may differ is where a sum over ranks was rounded, so the bound is
in units of the dtype's spacing. A whole tensor hides one stale row of thousands: rows are judged, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tpoverlap.testing.numeric import relative_error

_SPACINGS = 4
_FLOAT32_BOUND = 1e-5
_FP8_BOUND = 0.125
"""CONFORMANCE.md's rtol of FP8: another rounding upstream turns some elements over an FP8 rounding tie."""
_ROW_FACTOR = 4
"""A row may be that much farther off than a tensor: far below the 1.4 of a stale row and the 0.7 of a lost summand."""


def bound_of(dtype: torch.dtype, *, fp8: bool) -> float:
    """Largest relative difference between an overlapped tensor and its twin's."""
    return _FP8_BOUND if fp8 else max(_SPACINGS * torch.finfo(dtype).eps, _FLOAT32_BOUND)


def compare(
    names: Sequence[str], actual: Sequence[torch.Tensor], twin: Sequence[torch.Tensor], bound: float
) -> tuple[float, str | None]:
    """(the largest relative difference of all tensors, the first problem or None). A NaN is a problem."""
    worst = 0.0
    for name, one, other in zip(names, actual, twin, strict=True):
        if one.shape != other.shape:
            return math.nan, f"{name}: shape {list(one.shape)}, the twin has {list(other.shape)}"
        whole = relative_error(one, other)
        for what, found, allowed in (
            (name, whole, bound),
            (f"a row of {name}", _worst_row(one, other), _ROW_FACTOR * bound),
        ):
            if not found <= allowed:
                return found, f"wrong numbers: {what} differs from the twin by {found:.3e}, allowed {allowed:.3e}"
        worst = max(worst, whole)
    return worst, None


def require_finite(
    names: Sequence[str], actual: Sequence[torch.Tensor], twin: Sequence[torch.Tensor]
) -> tuple[float, str | None]:
    """For compute-only, whose numbers mean nothing: the twin's shapes, and no NaN that would change the power drawn."""
    for name, one, other in zip(names, actual, twin, strict=True):
        if one.shape != other.shape:
            return math.nan, f"{name}: shape {list(one.shape)}, the twin has {list(other.shape)}"
        if not bool(torch.isfinite(one).all()):
            return math.nan, f"{name} is not finite"
    return math.nan, None


def _worst_row(actual: torch.Tensor, twin: torch.Tensor) -> float:
    """The largest distance of a row, over the root mean square of the twin's rows; 0.0 for vectors and no rows."""
    if actual.dim() != 2 or not actual.numel():
        return 0.0
    wide = torch.promote_types(twin.dtype, torch.float32)
    distance = torch.linalg.vector_norm(actual.to(wide) - twin.to(wide), dim=1).max()
    scale = torch.linalg.vector_norm(twin, dtype=wide) / math.sqrt(twin.shape[0])
    return 0.0 if float(distance) == 0.0 else float(distance / scale)
