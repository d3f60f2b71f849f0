"""The decoder's weights: sizes, names, one initialisation for every tp_size, and each rank's slice of it.

=========================== ============== =====================================================
name                        full shape     shard of rank r
=========================== ============== =====================================================
``embedding``               [V, H]         replicated
``layers.i.attention_norm`` [H]            replicated
``layers.i.qkv``            [3H, H]        rows of q, k and v that belong to its heads: [3H/R, H]
``layers.i.proj``           [H, H]         columns of its heads: [H, H/R]
``layers.i.mlp_norm``       [H]            replicated
``layers.i.gate``, ``.up``  [F, H]         rows: [F/R, H]
``layers.i.down``           [H, F]         columns: [H, F/R]
``norm``                    [H]            replicated
``head``                    [V, H]         replicated
=========================== ============== =====================================================

A replicated weight's gradient on a rank covers that rank's rows only: it is ``sequence_parallel``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpoverlap.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder. ``hidden`` is H; every head has ``hidden / heads`` features, an even number (RoPE)."""

    hidden: int = 256
    layers: int = 4
    heads: int = 8
    ffn: int = 768
    vocab: int = 256
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.hidden // self.heads

    def validate(self, tp_size: int) -> None:
        """Raise ConfigError, with both numbers, for sizes that do not divide."""
        for name, value in (("hidden", self.hidden), ("layers", self.layers), ("heads", self.heads), ("ffn", self.ffn)):
            if value < 1:
                raise ConfigError(f"{name}={value} must be positive")
        if self.hidden % self.heads or self.head_dim % 2:
            raise ConfigError(
                f"hidden={self.hidden} gives heads={self.heads} no even whole number of features each; "
                f"choose hidden as a multiple of {2 * self.heads}"
            )
        for name, value in (("heads", self.heads), ("ffn", self.ffn)):
            if value % tp_size:
                raise ConfigError(
                    f"{name}={value} is not divisible by tp_size={tp_size}: each rank owns whole {name}; "
                    f"choose --{name} {-(-value // tp_size) * tp_size} or another --tp"
                )


def full_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Every weight, whole, float32 on the CPU: the same on every rank and in the reference."""
    generator = torch.Generator().manual_seed(seed)
    hidden, ffn = config.hidden, config.ffn

    def normal(*shape: int, std: float = 0.02) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    residual_std = 0.02 / (2 * config.layers) ** 0.5  # each of 2L residual additions keeps the sum's variance bounded
    weights = {"embedding": normal(config.vocab, hidden)}
    for i in range(config.layers):
        weights[f"layers.{i}.attention_norm"] = torch.ones(hidden)
        weights[f"layers.{i}.qkv"] = normal(3 * hidden, hidden)
        weights[f"layers.{i}.proj"] = normal(hidden, hidden, std=residual_std)
        weights[f"layers.{i}.mlp_norm"] = torch.ones(hidden)
        weights[f"layers.{i}.gate"] = normal(ffn, hidden)
        weights[f"layers.{i}.up"] = normal(ffn, hidden)
        weights[f"layers.{i}.down"] = normal(hidden, ffn, std=residual_std)
    weights["norm"] = torch.ones(hidden)
    weights["head"] = normal(config.vocab, hidden)
    return weights


def shard(name: str, full: Tensor, rank: int, tp_size: int) -> Tensor:
    """Rank ``rank``'s part of the weight (or gradient) called ``name``; contiguous, a copy where it is cut."""
    kind = name.rpartition(".")[2]
    if kind == "qkv":  # q, k and v are cut each for itself, so that a rank holds whole heads of all three
        return torch.cat([part.chunk(tp_size)[rank] for part in full.chunk(3)])
    if kind in ("gate", "up"):
        return full.chunk(tp_size)[rank].clone()
    if kind in ("proj", "down"):
        return full.chunk(tp_size, dim=1)[rank].clone(memory_format=torch.contiguous_format)
    return full


def unshard(name: str, shards: Sequence[Tensor]) -> Tensor:
    """The inverse of ``shard`` over all ranks; of a replicated weight, rank 0's copy."""
    kind = name.rpartition(".")[2]
    if kind == "qkv":
        return torch.cat([torch.cat(parts) for parts in zip(*(s.chunk(3) for s in shards), strict=True)])
    if kind in ("gate", "up"):
        return torch.cat(list(shards))
    if kind in ("proj", "down"):
        return torch.cat(list(shards), dim=1)
    return shards[0]


def is_replicated(name: str) -> bool:
    """True for weights that every rank holds whole."""
    return name.rpartition(".")[2] not in ("qkv", "proj", "gate", "up", "down")
