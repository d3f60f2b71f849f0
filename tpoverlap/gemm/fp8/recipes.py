"""Recipes: which FP8 formats, and where the scales come from. Names and defaults are Transformer Engine's.

=========================  ====================================  ==================================================
recipe                     scale of a tensor                     what ranks exchange about a gathered tensor
=========================  ====================================  ==================================================
``Float8CurrentScaling``   its own largest magnitude             one float32 a rank, before the rows
``DelayedScaling``         largest magnitudes of former steps    one float32 a rank, beside the rows (training only)
``Float8RowwiseScaling``   one a row: the row's own magnitude    one float32 a row, before the rows
=========================  ====================================  ==================================================

Row-wise scales do not come out of a sum over tokens, so that recipe computes weight gradients in the original dtype (as
torchao's "rowwise_with_gw_hp" does).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch

from tpoverlap.errors import ConfigError

Role = Literal["input", "weight", "grad"]


class Format(Enum):
    """FP8 formats, forward and backward. HYBRID has more mantissa forward and more range for gradients."""

    E4M3 = "e4m3"
    HYBRID = "hybrid"

    def dtype(self, role: Role) -> torch.dtype:
        """The torch dtype of a tensor in that role."""
        return torch.float8_e5m2 if self is Format.HYBRID and role == "grad" else torch.float8_e4m3fn


@dataclass(frozen=True)
class Recipe:
    """What all recipes have.

    Attributes:
        fp8_format: a `Format`, or "e4m3" or "hybrid".

    Raises:
        ConfigError: an argument is illegal.
    """

    fp8_format: Format | str = Format.HYBRID

    def __post_init__(self) -> None:
        given = self.fp8_format.value if isinstance(self.fp8_format, Format) else self.fp8_format
        legal = [one.value for one in Format]
        if not isinstance(given, str) or given.lower() not in legal:
            raise ConfigError(f"fp8_format={self.fp8_format!r} is unknown; use one of {', '.join(legal)}")
        object.__setattr__(self, "fp8_format", Format(given.lower()))

    def dtype(self, role: Role) -> torch.dtype:
        """The FP8 dtype of a tensor in that role."""
        assert isinstance(self.fp8_format, Format), "__post_init__ made it one"
        return self.fp8_format.dtype(role)


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """Per-tensor scale from the tensor itself; of a gathered tensor from all ranks' shards.

    Attributes:
        use_power_2_scales: round scales up to powers of two.
        amax_epsilon: magnitudes below it count as this much.
    """

    use_power_2_scales: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        epsilon = self.amax_epsilon
        if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 <= epsilon < float("inf"):
            raise ConfigError(f"amax_epsilon must be a finite number of at least 0, got {epsilon!r}")
        # Ranks compare recipes as text, and a kernel is compiled for the type: 0 and 0.0 have to be the same.
        object.__setattr__(self, "amax_epsilon", float(epsilon))
        object.__setattr__(self, "use_power_2_scales", bool(self.use_power_2_scales))


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """Per-tensor scale from the magnitudes of former steps: nothing is waited for, but a sudden larger value saturates.

    The history is a buffer of `Fp8State`, so ``state_dict`` carries it. The scale is 1 until there is any.

    Attributes:
        margin: scales leave ``2**margin`` of headroom.
        amax_history_len: steps that are remembered.
        amax_compute_algo: "max" over the history, or "most_recent".
    """

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.margin, bool) or not isinstance(self.margin, int) or abs(self.margin) > 64:
            raise ConfigError(f"margin must be an integer between -64 and 64, got {self.margin!r}")
        length = self.amax_history_len
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ConfigError(f"amax_history_len must be an integer of at least 1, got {length!r}")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ConfigError(f"amax_compute_algo={self.amax_compute_algo!r} is unknown; use 'max' or 'most_recent'")


@dataclass(frozen=True)
class Float8RowwiseScaling(Recipe):
    """One scale a row of activations and gradients (a token), and one a row of weights (an output feature).

    Both operands of a GEMM must then be E4M3 on the GPU: the default format is E4M3.
    """

    fp8_format: Format | str = Format.E4M3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp8_format is not Format.E4M3:
            raise ConfigError("row-wise scaling runs with fp8_format='e4m3' only; use it, or a per-tensor recipe")
