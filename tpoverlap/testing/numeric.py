"""Tolerances: how near a result has to be, and what a test prints when it is not.

Every comparison covers whole tensors, runs in float64, and is written so that a NaN never passes.
"""

from __future__ import annotations

import math

import torch

FLOAT32_FLOOR = 4 * torch.finfo(torch.float32).eps
"""Relative error that the order of float32 additions alone explains.

Two correct GEMMs that add the same products in another order differ by a few float32 roundings, and so does the
float32 reference itself. Where the twin happens to hit the reference exactly (one row, integers, R = 1), 1.25 times its
error is zero and says nothing; this floor keeps such a case passable. In bf16 it is 1/16000 of one rounding, so it
hides no bug there: an element that an addition's order pushes over a rounding tie is about as far from the reference on
either side of the tie.
"""

FEW = 1024
"""Elements below which a relative error is too noisy to be held to a fixed factor of another one."""


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of ``actual - reference`` over that of ``reference``, in float64.

    0.0 for empty tensors and for two zero tensors, ``inf`` when only the reference is zero, ``nan`` when ``actual`` or
    ``reference`` holds a NaN or the difference of two infinities.

    Raises:
        AssertionError: the shapes differ.
    """
    _require_same_shape(actual, reference, "relative_error")
    reference64 = reference.detach().double()
    distance = float(torch.linalg.vector_norm(actual.detach().double().to(reference64.device) - reference64))
    if distance == 0.0:
        return 0.0
    norm = float(torch.linalg.vector_norm(reference64))
    return distance / norm if norm else math.copysign(math.inf, distance)


def assert_close_to_twin(
    actual: torch.Tensor,
    twin: torch.Tensor,
    reference_fp32: torch.Tensor,
    factor: float = 1.25,
    what: str = "result",
) -> None:
    """``actual`` may be at most ``factor`` times as far from the float32 reference as the non-overlapped ``twin`` is.

    The twin ran in the same dtype on the same inputs, so its error is what the dtype costs; 1.25 leaves room for
    another order of additions, and none for a row that is missing, stale or summed twice. ``FLOAT32_FLOOR`` is added.
    Over n < `FEW` elements both errors are themselves uncertain by some 1 / sqrt(2 n): the factor grows by 4 / sqrt(n).

    Raises:
        AssertionError: too far, not a number, or shapes or dtypes differ.
    """
    _require_same_shape(actual, twin, what)
    _require_same_shape(actual, reference_fp32, what)
    if actual.dtype != twin.dtype:
        raise AssertionError(f"{what}: dtype {actual.dtype}, the twin has {twin.dtype}")
    twin_error = relative_error(twin, reference_fp32)
    if not math.isfinite(twin_error):
        raise AssertionError(f"{what}: the twin itself has relative error {twin_error}; {_worst(twin, reference_fp32)}")
    error = relative_error(actual, reference_fp32)
    if 0 < actual.numel() < FEW:
        factor *= 1.0 + 4.0 / math.sqrt(actual.numel())
    bound = factor * twin_error + FLOAT32_FLOOR
    if not error <= bound:
        raise AssertionError(
            f"{what}: relative error {error:.3e} > {bound:.3e} = {factor:g} x {twin_error:.3e} (twin) + "
            f"{FLOAT32_FLOOR:.1e}; against the reference, {_worst(actual, reference_fp32)}"
        )


def assert_elementwise(
    actual: torch.Tensor,
    reference: torch.Tensor,
    rtol: float = 1.6e-2,
    atol_scale: float = 1e-5,
    what: str = "result",
) -> None:
    """``|actual - reference| <= rtol * |reference| + atol_scale * max |reference|`` for every element.

    1.6e-2 is twice the spacing of bf16 (2**-7), what two roundings of the same number can differ by; the absolute term
    scales with the tensor, so that it stays as strict when the numbers are small.

    Raises:
        AssertionError: an element is too far off or not a number, or the shapes differ.
    """
    _require_same_shape(actual, reference, what)
    if not actual.numel():
        return
    reference64 = reference.detach().double()
    distance = (actual.detach().double().to(reference64.device) - reference64).abs()
    bound = rtol * reference64.abs() + atol_scale * reference64.abs().max()
    good = distance <= bound
    if not bool(good.all()):
        raise AssertionError(
            f"{what}: {int((~good).sum())} of {good.numel()} elements differ by more than rtol={rtol:g}, "
            f"atol={atol_scale:g} x {float(reference64.abs().max()):.4g}; {_worst(actual, reference, distance - bound)}"
        )


def _require_same_shape(actual: torch.Tensor, reference: torch.Tensor, what: str) -> None:
    if actual.shape != reference.shape:
        raise AssertionError(f"{what}: shape {list(actual.shape)}, expected {list(reference.shape)}")


def _worst(actual: torch.Tensor, reference: torch.Tensor, badness: torch.Tensor | None = None) -> str:
    """The element with the largest badness (distance unless given), a NaN before all others."""
    reference64 = reference.detach().double()
    actual64 = actual.detach().double().to(reference64.device)
    if badness is None:
        badness = (actual64 - reference64).abs()
    flat = int(badness.nan_to_num(nan=math.inf, posinf=math.inf).reshape(-1).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), actual.shape)]
    got, want = float(actual64.reshape(-1)[flat]), float(reference64.reshape(-1)[flat])
    return f"worst at {index}: got {got!r}, expected {want!r}"
