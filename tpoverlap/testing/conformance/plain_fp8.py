"""FP8 twins in plain torch: what each rank's tensors look like in FP8, without communication or gemm.fp8's code.

A twin multiplies FP8 numbers in float32 and rounds once, as tensor cores do; the reference does it in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from tpoverlap.gemm.fp8 import DelayedScaling, Float8CurrentScaling, Float8RowwiseScaling, Recipe
from tpoverlap.gemm.fp8.recipes import Role

_TINY = torch.finfo(torch.float32).tiny
Precision = Literal["twin", "reference"]


@dataclass
class PlainTensor:
    """FP8 numbers as float32 [rows, columns], and float32 scales, [1, 1] or [rows, 1]."""

    numbers: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype

    def t(self) -> PlainTensor:
        """The transposed numbers under the same scale (per-tensor only)."""
        return PlainTensor(self.numbers.t(), self.scale, self.dtype)

    def rows(self, rows: slice) -> PlainTensor:
        """Some of the rows."""
        return PlainTensor(self.numbers[rows], self.scale if self.scale.numel() == 1 else self.scale[rows], self.dtype)

    def wide(self) -> torch.Tensor:
        """The numbers that FP8 stands for, float64."""
        return self.numbers.double() * self.scale.double()


def product(left: PlainTensor, right: PlainTensor, precision: Precision) -> torch.Tensor:
    """``left`` [M, K] times ``right`` [N, K] transposed."""
    if precision == "reference":
        return left.wide() @ right.wide().t()
    return ((left.numbers @ right.numbers.t()) * (left.scale * right.scale.t())).to(left.dtype)


@dataclass
class PlainQuantizer:
    """What `Quantizer` does for one tensor, told by the whole tensor instead of by an exchange.

    Args:
        gathered: the tensor travels, so all ranks must know its scale before (delayed scaling starts with 1).
    """

    recipe: Recipe
    role: Role
    gathered: bool
    window: list[float] = field(default_factory=list)
    stored: torch.Tensor = field(default_factory=lambda: torch.ones(1, 1))

    def __call__(self, x: torch.Tensor) -> PlainTensor:
        """``x`` [rows, columns]: all rows, of all ranks."""
        dtype, recipe = self.recipe.dtype(self.role), self.recipe
        amax = x.abs().amax().float().reshape(1, 1) if x.numel() else torch.zeros(1, 1, device=x.device)
        if isinstance(recipe, Float8RowwiseScaling):
            scale = self._scale(x.abs().amax(1, keepdim=True).float(), 1.0)
        elif isinstance(recipe, DelayedScaling):
            headroom = 2.0**recipe.margin
            unknown = not any(self.window) and not self.gathered
            scale = self._scale(amax, headroom) if unknown else self.stored.to(x.device)
            self.window = [*self.window, float(amax)][-recipe.amax_history_len :]
            chosen = max(self.window) if recipe.amax_compute_algo == "max" else self.window[-1]
            if chosen > 0:
                self.stored = self._scale(torch.tensor([[chosen]], dtype=torch.float32), headroom)
        else:
            assert isinstance(recipe, Float8CurrentScaling), f"no plain twin of {recipe}"
            scale = self._scale(amax, 1.0)
            if recipe.use_power_2_scales:
                scale = torch.where(amax > 0, 2.0 ** torch.ceil(torch.log2(scale.double())), 1.0).float()
        most = torch.finfo(dtype).max
        return PlainTensor((x.float() * (1 / scale)).clamp(-most, most).to(dtype).float(), scale, x.dtype)

    def _scale(self, amax: torch.Tensor, headroom: float) -> torch.Tensor:
        scale = amax * (headroom / torch.finfo(self.recipe.dtype(self.role)).max)
        return torch.where(amax > 0, scale.clamp(min=_TINY), torch.ones_like(scale))


def packed_sum(partials: list[torch.Tensor], recipe: Recipe, role: Role, splits: list[slice]) -> torch.Tensor:
    """An ``fp8_buf`` reduce-scatter of [T, N] partial sums: each row of each split in FP8 by its own scale."""
    total = torch.zeros_like(partials[0], dtype=torch.float32)
    rowwise = PlainQuantizer(_as_rowwise(recipe, role), "weight", gathered=False)
    for partial in partials:
        for columns in splits:
            quantised = rowwise(partial[:, columns])
            total[:, columns] += quantised.numbers * quantised.scale
    return total.to(partials[0].dtype)


def _as_rowwise(recipe: Recipe, role: Role) -> Recipe:
    """Row-wise scaling in the format that ``recipe`` has for ``role``."""
    made = Float8RowwiseScaling()
    if recipe.dtype(role) == torch.float8_e5m2:
        object.__setattr__(made, "dtype", lambda _: torch.float8_e5m2)
    return made
