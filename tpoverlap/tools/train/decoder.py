"""The decoder with tensor and sequence parallelism: each rank holds its rows [T_r, H] between the GEMMs.

::

    x_shard_t [T_r, H] ─ norm ─ AG+GEMM "qkv"  ─ [T, 3H/R]    ─ attention, local heads ─ GEMM+RS "proj" ─ + x_shard_t
                       ─ norm ─ AG+GEMMs "fc1" ─ 2 x [T, F/R] ─ SwiGLU                 ─ GEMM+RS "fc2"  ─ + x_shard_t

All layers share the buffers of the four names. Embedding and head are replicated and see the rank's rows only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpoverlap as tpo
from tpoverlap.tools.train.attention import packed_causal_attention, rotary_table
from tpoverlap.tools.train.packing import PackedBatch
from tpoverlap.tools.train.reference import gradients_on_cpu, token_loss_sum
from tpoverlap.tools.train.weights import ModelConfig, is_replicated, shard, unshard

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager
    from tpoverlap.tokens import TokenPartition


class DecoderLayer(nn.Module):
    """Attention and SwiGLU with their norms: [T_r, H] -> [T_r, H]."""

    def __init__(
        self, config: ModelConfig, manager: UserBufferManager, tp_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        hidden, ffn = config.hidden, config.ffn
        self.config = config
        self.manager = manager
        self.local_heads = config.heads // tp_size
        self.attention_norm = nn.Parameter(torch.empty(hidden, device=device, dtype=dtype))
        self.mlp_norm = nn.Parameter(torch.empty(hidden, device=device, dtype=dtype))
        self.qkv = tpo.nn.Linear(
            hidden,
            3 * hidden,
            bias=False,
            parallel_mode="column",
            manager=manager,
            ub_name="qkv",
            device=device,
            dtype=dtype,
        )
        self.proj = tpo.nn.Linear(
            hidden, hidden, bias=False, parallel_mode="row", manager=manager, ub_name="proj", device=device, dtype=dtype
        )
        self.gate = nn.Parameter(torch.empty(ffn // tp_size, hidden, device=device, dtype=dtype))
        self.up = nn.Parameter(torch.empty(ffn // tp_size, hidden, device=device, dtype=dtype))
        self.down = tpo.nn.Linear(
            ffn, hidden, bias=False, parallel_mode="row", manager=manager, ub_name="fc2", device=device, dtype=dtype
        )

    def forward(self, x_shard_t: Tensor, batch: PackedBatch, rotary: tpo.nn.RotaryTable) -> Tensor:
        """x_shard_t [T_r, H]; ``batch`` and ``rotary`` describe all T rows, which attention sees."""
        config = self.config
        h = F.rms_norm(x_shard_t, (config.hidden,), self.attention_norm, config.norm_eps)
        qkv = self.qkv(h).view(-1, 3, self.local_heads, config.head_dim)
        attended = packed_causal_attention(
            rotary.rotate(qkv[:, 0]), rotary.rotate(qkv[:, 1]), qkv[:, 2], batch.cu_seqlens
        )
        x_shard_t = x_shard_t + self.proj(attended.flatten(1))
        h = F.rms_norm(x_shard_t, (config.hidden,), self.mlp_norm, config.norm_eps)
        gate, up = tpo.all_gather_gemm(h, [self.gate, self.up], self.manager.layer("fc1"))  # one gather for both
        down: Tensor = self.down(F.silu(gate) * up)
        return x_shard_t + down


class TensorParallelDecoder(nn.Module):
    """tokens of a `PackedBatch` -> logits [T_r, V] of this rank's rows, under the manager's active shape."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        manager: UserBufferManager,
        *,
        rank: int,
        tp_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config, self.rank = config, rank
        self.embedding = nn.Parameter(torch.empty(config.vocab, config.hidden, device=device, dtype=dtype))
        self.layers = nn.ModuleList(DecoderLayer(config, manager, tp_size, device, dtype) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.empty(config.hidden, device=device, dtype=dtype))
        self.head = nn.Parameter(torch.empty(config.vocab, config.hidden, device=device, dtype=dtype))
        with torch.no_grad():
            for name, parameter in self.named_weights().items():
                parameter.copy_(shard(name, weights[name], rank, tp_size))
                if is_replicated(name):  # this rank's gradient covers its rows only: sync_replicated_grads adds them up
                    parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Parameters under the names of `weights.full_weights`."""
        return {name.removesuffix(".weight"): parameter for name, parameter in self.named_parameters()}

    def losses(self, batch: PackedBatch, partition: TokenPartition) -> tuple[Tensor, Tensor]:
        """(what ``backward`` starts from, this rank's rows' share): both the cross entropies of own rows, nats."""
        rows = partition.rows(self.rank)
        loss_sum = token_loss_sum(self(batch, rows), batch.targets[rows])
        return loss_sum, loss_sum.detach()

    def shard_gradients(self) -> dict[str, Tensor]:
        """This rank's gradients, float32 on the CPU, under the names of `weights.full_weights`."""
        return gradients_on_cpu(self.named_weights())

    @staticmethod
    def unshard(name: str, shards: Sequence[Tensor]) -> Tensor:
        """All ranks' `shard_gradients` of one name, put together."""
        return unshard(name, shards)

    def forward(self, batch: PackedBatch, rows: slice) -> Tensor:
        """Logits of ``rows``, this rank's part of ``batch``; [0, V] where it owns none."""
        config = self.config
        rotary = rotary_table(batch, config.head_dim, config.rope_base)
        x_shard_t = F.embedding(batch.tokens[rows], self.embedding)
        for layer in self.layers:
            x_shard_t = layer(x_shard_t, batch, rotary)
        return F.linear(F.rms_norm(x_shard_t, (config.hidden,), self.norm, config.norm_eps), self.head)
