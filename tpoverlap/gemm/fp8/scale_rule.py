"""How a magnitude becomes a scale: one small value for the kernels and for their twins."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class ScaleRule:
    """The scale that maps a magnitude onto an FP8 format's largest number.

    Attributes:
        dtype: the FP8 format.
        margin: leave ``2**margin`` of headroom.
        power_of_2: round up to a power of two.
        epsilon: magnitudes below it count as this much.
        factor: what a magnitude is multiplied with, before all rounding.
        is_e5m2: which of the two formats.
    """

    dtype: torch.dtype
    margin: int = 0
    power_of_2: bool = False
    epsilon: float = 0.0
    factor: float = field(init=False)
    is_e5m2: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", 2.0**self.margin / torch.finfo(self.dtype).max)
        object.__setattr__(self, "is_e5m2", self.dtype == torch.float8_e5m2)
