"""The norm in front of a column-parallel GEMM: LayerNorm or RMSNorm of a shard's rows, each row for itself.

It runs on the shard [T_r, H], before the gather: 1 / R of the work, and what is gathered is what the GEMM reads. Its
weight and bias are replicated and see own rows only: `sync_replicated_grads`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tpoverlap.errors import ConfigError
from tpoverlap.nn.parameters import add_parameter, require_positive
from tpoverlap.nn.shard_spec import ShardSpec

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


class NormOptions:
    """Which norm, and its numbers.

    Raises:
        ConfigError: ``normalization`` is neither "LayerNorm" nor "RMSNorm", or ``eps`` is not above 0 and finite.
    """

    def __init__(self, width: int, eps: float, normalization: str, zero_centered_gamma: bool) -> None:
        if normalization not in NORMALIZATIONS:
            raise ConfigError(f"normalization={normalization!r} is not known; use one of {', '.join(NORMALIZATIONS)}")
        require_positive("the norm's eps", eps)
        self.width, self.eps, self.normalization = width, eps, normalization
        self.zero_centered_gamma = zero_centered_gamma

    def add_parameters(
        self,
        module: torch.nn.Module,
        manager: UserBufferManager,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        *,
        sequence_parallel: bool,
    ) -> None:
        """``layer_norm_weight`` [H], and ``layer_norm_bias`` [H] (None for RMSNorm), on ``module``."""
        for name in ("layer_norm_weight", "layer_norm_bias"):
            module.register_parameter(name, None)
            if name == "layer_norm_weight" or self.normalization == "LayerNorm":
                spec = ShardSpec((self.width,))
                add_parameter(module, name, spec, manager, device, dtype, replicated=sequence_parallel)

    def reset(self, module: torch.nn.Module) -> None:
        """The identity scale: ones, or zeros where the scale is 1 + weight; no shift."""
        weight, bias = module.layer_norm_weight, module.layer_norm_bias
        assert isinstance(weight, torch.Tensor), "made by add_parameters"
        torch.nn.init.constant_(weight, 0.0 if self.zero_centered_gamma else 1.0)
        if isinstance(bias, torch.Tensor):
            torch.nn.init.zeros_(bias)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Normalise the rows of x [t, H]; ``zero_centered_gamma`` scales by 1 + weight."""
        scale = weight + 1 if self.zero_centered_gamma else weight
        if self.normalization == "RMSNorm":
            return F.rms_norm(x, (self.width,), scale, self.eps)
        return F.layer_norm(x, (self.width,), scale, bias, self.eps)
