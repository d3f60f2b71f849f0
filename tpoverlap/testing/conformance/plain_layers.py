"""Twins of the layers in plain torch: all ranks' shards on one rank, no communication, rounding where the layers round.

``parameters`` maps a layer's parameter names to one leaf a rank. A replicated parameter is R equal leaves, each for its
rank's rows, as in the real thing; without sequence parallelism leaf q is what rank q would compute on all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tpoverlap.nn.activation import PLAIN_ACTIVATIONS
from tpoverlap.nn.attention import packed_attention
from tpoverlap.nn.rotary import RotaryTable
from tpoverlap.nn.sequences import PackedSequences
from tpoverlap.testing.conformance import plain
from tpoverlap.tokens import TokenPartition

Parameters = Mapping[str, Sequence[torch.Tensor]]
_GATES = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}


@dataclass(frozen=True)
class Group:
    """One microbatch on R ranks, and what the layers were made with.

    Attributes:
        whole: without sequence parallelism.
        fused_bias: see `plain.row_linear`.
    """

    partition: TokenPartition
    whole: bool = False
    fused_bias: bool = True
    eps: float = 1e-5

    @property
    def size(self) -> int:
        """R."""
        return self.partition.tp_size


def under(parameters: Parameters, prefix: str) -> Parameters:
    """The parameters of a submodule, by its names."""
    return {
        name.removeprefix(f"{prefix}."): shards for name, shards in parameters.items() if name.startswith(f"{prefix}.")
    }


def norm(group: Group, parameters: Parameters, x: torch.Tensor) -> list[torch.Tensor]:
    """What each rank's column GEMM reads, [T, H] each; dx is summed over ranks as `rank_sum` does."""
    weights = parameters["layer_norm_weight"]
    biases = parameters.get("layer_norm_bias")

    def one(rows: torch.Tensor, rank: int) -> torch.Tensor:
        if biases is None:
            return F.rms_norm(rows, (x.shape[1],), weights[rank], group.eps)
        return F.layer_norm(rows, (x.shape[1],), weights[rank], biases[rank], group.eps)

    if group.whole:
        # Every rank normalises all rows, and gets the all-reduced gradient for its own copy of the weights.
        normed = one(x, 0)
    else:
        normed = torch.cat([one(x[group.partition.rows(rank)], rank) for rank in range(group.size)])
    return list(plain.fan_out(normed, group.size))


def column(
    xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None
) -> list[torch.Tensor]:
    """Each rank's part of a column-parallel output."""
    return [
        plain.linear(x, w, None if biases is None else biases[q])
        for q, (x, w) in enumerate(zip(xs, weights, strict=True))
    ]


def row(
    group: Group, xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None
) -> torch.Tensor:
    """[T, N]. Without sequence parallelism leaf 0 of the bias stands for all rows."""
    if group.whole and biases is not None:
        biases = [biases[0]] * group.size
    return plain.row_linear(xs, weights, biases, group.partition, group.fused_bias)


def activate(name: str, h: torch.Tensor) -> torch.Tensor:
    """Of h [T, F], or of gate and up side by side."""
    if name not in _GATES:
        return PLAIN_ACTIVATIONS[name](h)
    gate, up = h.chunk(2, dim=-1)
    return PLAIN_ACTIVATIONS[_GATES[name]](gate) * up


def layer_norm_linear(group: Group, parameters: Parameters, x: torch.Tensor) -> list[torch.Tensor]:
    """[T, K] -> [T, N / R] a rank."""
    return column(norm(group, parameters, x), parameters["weight"], parameters.get("bias"))


def layer_norm_mlp(group: Group, parameters: Parameters, x: torch.Tensor, activation: str) -> torch.Tensor:
    """[T, H] -> [T, H]."""
    hs = column(norm(group, parameters, x), parameters["fc1_weight"], parameters.get("fc1_bias"))
    return row(group, [activate(activation, h) for h in hs], parameters["fc2_weight"], parameters.get("fc2_bias"))


@dataclass(frozen=True)
class Heads:
    """Heads of one rank, and how they attend."""

    num_heads: int
    num_groups: int
    head_dim: int
    sequences: PackedSequences
    rotary_base: float | None


def attention(heads: Heads, group: Group, parameters: Parameters, x: torch.Tensor) -> torch.Tensor:
    """[T, H] -> [T, H]; with an input norm if there are parameters for one."""
    name = "layernorm_qkv" if "layernorm_qkv.weight" in parameters else "qkv"
    inner, proj = under(parameters, name), under(parameters, "proj")
    xs = norm(group, inner, x) if name == "layernorm_qkv" else list(plain.fan_out(x, group.size))
    attended = [_attend(heads, mixed) for mixed in column(xs, inner["weight"], inner.get("bias"))]
    return row(group, attended, proj["weight"], proj.get("bias"))


def _attend(heads: Heads, mixed: torch.Tensor) -> torch.Tensor:
    """Slice by slice: query heads of a group, then its key and its value."""
    d, per_group = heads.head_dim, heads.num_heads // heads.num_groups
    blocks = mixed.view(mixed.shape[0], -1, d)
    starts = [group * (per_group + 2) for group in range(heads.num_groups)]
    q = torch.cat([blocks[:, start : start + per_group] for start in starts], dim=1)
    k = torch.stack([blocks[:, start + per_group] for start in starts], dim=1)
    v = torch.stack([blocks[:, start + per_group + 1] for start in starts], dim=1)
    if heads.rotary_base is not None:
        table = RotaryTable.of(heads.sequences.positions, d, heads.rotary_base)
        q, k = table.rotate(q), table.rotate(k)
    return packed_attention(q, k, v, heads.sequences).flatten(1)


def transformer(heads: Heads, group: Group, parameters: Parameters, x: torch.Tensor, activation: str) -> torch.Tensor:
    """[T, H] -> [T, H]."""
    x = x + attention(heads, group, under(parameters, "self_attention"), x)
    return x + layer_norm_mlp(group, under(parameters, "layernorm_mlp"), x, activation)
