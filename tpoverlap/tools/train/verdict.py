"""``--check-reference``: how far the TP run is from the plain one, and whether that is close enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

# float32: reordered sums alone give 1e-6 to 4e-6 after 20 steps of AdamW at the defaults; a missing gradient 1e-1.
# bfloat16: the roundings of R partial sums differ from those of one; measured at the defaults 9e-4.
# FP8: the reference rounds to FP8 where the ranks do, so a step differs only in the few numbers that a reordered sum
# pushes over an FP8 rounding tie. AdamW makes full-sized updates of these differences: after 20 steps at the defaults
# 8e-3. The first step's gradients are the sharp part of the check: see below.
LOSS_TOLERANCE: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 1e-2, "fp8 float32": 5e-2, "fp8 bfloat16": 5e-2}
# Of the largest entry of a gradient. Measured: float32 7e-7, bfloat16 5e-2 (sums of up to C rounded terms).
# FP8 in float32: a number that turns over a tie is off by 2**-4, one of many in a sum; where it moves the largest
# magnitude, every number of that tensor is rounded anew: 1e-6 to 1e-2. A scale that is not the ranks' own (of other
# shards, of another recipe) does that everywhere: 8e-2 and more in the worst gradient, which one is enough to refuse.
# bfloat16's own roundings hide such a scale.
GRADIENT_TOLERANCE: Mapping[str, float] = {
    "float32": 1e-4,
    "bfloat16": 1.5e-1,
    "fp8 float32": 5e-2,
    "fp8 bfloat16": 1.5e-1,
}


@dataclass(frozen=True)
class Verdict:
    """Outcome of the comparison; ``problems`` is empty when everything holds.

    Attributes:
        max_abs_loss_difference: over all steps.
        gradient_differences: weight name -> largest absolute difference over the reference's largest absolute entry.
    """

    max_abs_loss_difference: float
    gradient_differences: dict[str, float]
    loss_fell: bool | None
    problems: tuple[str, ...]


def judge(
    losses: Sequence[float],
    reference_losses: Sequence[float],
    gradients: Mapping[str, Tensor],
    reference_gradients: Mapping[str, Tensor],
    numbers: str,
) -> Verdict:
    """Compare every step's loss, every gradient of the first step, and the direction of the loss.

    ``numbers``: `TrainJob.numbers`.
    """
    problems: list[str] = []
    loss_differences = [abs(a - b) for a, b in zip(losses, reference_losses, strict=True)]
    tolerance = LOSS_TOLERANCE[numbers]
    worst = max(range(len(losses)), key=lambda i: (loss_differences[i] != loss_differences[i], loss_differences[i]))
    if not loss_differences[worst] <= tolerance:  # written so that NaN fails
        problems.append(
            f"the loss of step {worst + 1} is {losses[worst]:.6f}, the reference's {reference_losses[worst]:.6f}: "
            f"they differ by {loss_differences[worst]:.2e}, allowed is {tolerance:.0e}"
        )
    differences = {name: _relative_difference(gradients.get(name), ref) for name, ref in reference_gradients.items()}
    for name, difference in differences.items():
        if not difference <= GRADIENT_TOLERANCE[numbers]:
            problems.append(
                f"the first gradient of {name} differs by {difference:.2e} of its largest entry, "
                f"allowed is {GRADIENT_TOLERANCE[numbers]:.0e}"
            )
    fell = loss_falls(losses)
    if fell is False:
        problems.append(f"the loss did not fall: {losses[0]:.4f} at step 1, {fmean(losses[-3:]):.4f} at the end")
    return Verdict(loss_differences[worst], differences, fell, tuple(problems))


def loss_falls(losses: Sequence[float]) -> bool | None:
    """Mean of the last (at most three) losses below the first; None when one step alone says nothing."""
    if len(losses) < 2:
        return None
    return fmean(losses[max(1, len(losses) - 3) :]) < losses[0]


def _relative_difference(actual: Tensor | None, expected: Tensor) -> float:
    if actual is None or actual.shape != expected.shape:
        return float("inf")
    scale = expected.abs().max().item()
    difference = (actual - expected).abs().max().item()
    return difference / scale if scale > 0 else difference
