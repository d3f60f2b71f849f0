"""Rotary positions over packed sequences, on whole rows [T, heads, d] of this rank's heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpoverlap.errors import ConfigError
from tpoverlap.nn.elementwise.qkv_heads import rotate
from tpoverlap.nn.parameters import require_positive, require_sizes


@dataclass(frozen=True)
class RotaryTable:
    """cos and sin of every row's angles, float32 [T, 1, d/2]: make it once a microbatch, for all layers."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, positions: Tensor, head_dim: int, base: float = 10_000.0) -> RotaryTable:
        """Angles of ``positions`` [T] (`PackedSequences.positions`): pair i turns by position * base^(-2i/d).

        Raises:
            ConfigError: ``base`` is not a finite number above 0, or ``head_dim`` no even number of at least 2.
        """
        require_positive("the base of rotary positions", base)
        require_sizes(head_dim=head_dim)
        if head_dim % 2:
            raise ConfigError(f"rotary positions turn pairs of features, but head_dim={head_dim} is odd")
        exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
        angles = positions.to(torch.float32)[:, None] * base**-exponent
        return cls(angles.cos()[:, None, :], angles.sin()[:, None, :])

    def rotate(self, x: Tensor) -> Tensor:
        """[T, heads, d] -> the same shape and dtype, feature i turned together with feature i + d/2 (as in Llama)."""
        return rotate(x, self.cos, self.sin)
