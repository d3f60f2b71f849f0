"""The same decoder from `tpoverlap.nn`'s Transformer Engine style layers, with both ends cut along the vocabulary.

::

    tokens [T] ─ VocabParallelEmbedding ─ x_shard_t [T_r, H] ─ TransformerLayers ─ norm ─ VocabParallelHead
               ─ logits [T, V/R] ─ vocab_parallel_cross_entropy ─ losses [T], on every rank

The weights are those of `weights.full_weights`; `to_layer` and `from_layer` go between their layout and the layers'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpoverlap as tpo
from tpoverlap.tools.train.packing import IGNORED_TARGET, PackedBatch
from tpoverlap.tools.train.weights import ModelConfig, shard, unshard

if TYPE_CHECKING:
    from tpoverlap.gemm.fp8 import Recipe
    from tpoverlap.manager import UserBufferManager
    from tpoverlap.tokens import TokenPartition

_CUT_VOCABULARY = ("embedding", "head")
_OF_LAYER = {
    "attention_norm": "self_attention.layernorm_qkv.layer_norm_weight",
    "qkv": "self_attention.layernorm_qkv.weight",
    "proj": "self_attention.proj.weight",
    "mlp_norm": "layernorm_mlp.layer_norm_weight",
    "down": "layernorm_mlp.fc2_weight",
}


class TeStyleDecoder(nn.Module):
    """Losses of a `PackedBatch` under a partition. Registers the names "embedding" and "lm_head" with ``manager``."""

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
        fp8_recipe: Recipe | None = None,
    ) -> None:
        super().__init__()
        self.config, self.rank, self.tp_size, self.manager = config, rank, tp_size, manager
        for name in ("embedding", "lm_head"):
            manager.register(name, width=config.hidden)
        common: dict[str, Any] = {"manager": manager, "params_dtype": dtype, "device": device}
        self.embedding = tpo.nn.VocabParallelEmbedding(config.vocab, config.hidden, **common)
        self.layers = nn.ModuleList(
            tpo.nn.TransformerLayer(
                config.hidden,
                config.ffn,
                config.heads,
                layernorm_epsilon=config.norm_eps,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                fp8_recipe=fp8_recipe,
                **common,
            )
            for _ in range(config.layers)
        )
        self.norm = nn.Parameter(torch.empty(config.hidden, device=device, dtype=dtype))
        self.norm.sequence_parallel = True  # type: ignore[attr-defined]  # read by sync_replicated_grads
        self.head = tpo.nn.VocabParallelHead(config.hidden, config.vocab, **common)
        with torch.no_grad():
            self._load(weights)

    def losses(self, batch: PackedBatch, partition: TokenPartition) -> tuple[Tensor, Tensor]:
        """(what ``backward`` starts from, this rank's rows' share): sums of cross entropies, nats.

        Every rank has the losses of all rows, so the first is the whole sum on each of them.
        """
        config, num_tokens = self.config, batch.num_tokens
        offsets = batch.cu_seqlens if batch.cu_seqlens[-1] == num_tokens else (*batch.cu_seqlens, num_tokens)
        sequences = tpo.nn.PackedSequences(offsets, num_tokens, batch.tokens.device)  # padding is one more sequence
        rotary = tpo.nn.RotaryTable.of(batch.positions, config.head_dim, config.rope_base)
        x_shard_t = self.embedding(batch.tokens, partition)
        for layer in self.layers:
            x_shard_t = layer(x_shard_t, sequences, rotary_pos_emb=rotary, partition=partition)
        x_shard_t = F.rms_norm(x_shard_t, (config.hidden,), self.norm, config.norm_eps)
        logits = self.head(x_shard_t, partition)
        losses = tpo.nn.vocab_parallel_cross_entropy(
            logits, batch.targets, config.vocab, self.manager, ignore_index=IGNORED_TARGET
        )
        return losses.sum(), losses.detach()[partition.rows(self.rank)].sum()

    def shard_gradients(self) -> dict[str, Tensor]:
        """This rank's gradients, float32 on the CPU, under the names of `weights.full_weights`, in their layout."""
        found: dict[str, Tensor] = {}

        def grad(parameter: Tensor) -> Tensor:
            return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

        for name, parameter in self._plain_parameters().items():
            found[name] = grad(parameter)
        for i, layer in enumerate(self.layers):
            qkv = grad(layer.get_parameter(_OF_LAYER["qkv"]))
            found[f"layers.{i}.qkv"] = qkv.view(-1, 3, self.config.head_dim, qkv.shape[1]).transpose(0, 1).flatten(0, 2)
            found[f"layers.{i}.gate"], found[f"layers.{i}.up"] = grad(
                layer.get_parameter("layernorm_mlp.fc1_weight")
            ).chunk(2)
        return {name: value.float().cpu().clone() for name, value in found.items()}

    @staticmethod
    def unshard(name: str, shards: Sequence[Tensor]) -> Tensor:
        """All ranks' `shard_gradients` of one name, put together."""
        return torch.cat(list(shards)) if name in _CUT_VOCABULARY else unshard(name, shards)

    def _plain_parameters(self) -> dict[str, nn.Parameter]:
        """Those whose shard is laid out as `weights.shard` cuts it."""
        named = {"embedding": self.embedding.weight, "norm": self.norm, "head": self.head.weight}
        for i, layer in enumerate(self.layers):
            named |= {
                f"layers.{i}.{kind}": layer.get_parameter(name) for kind, name in _OF_LAYER.items() if kind != "qkv"
            }
        return named

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._plain_parameters().items():
            cut = weights[name][self.embedding.vocabulary] if name in _CUT_VOCABULARY else self._shard(weights, name)
            parameter.copy_(cut)
        for i, layer in enumerate(self.layers):
            # Head by head: its query, key and value rows.
            qkv = self._shard(weights, f"layers.{i}.qkv").view(3, -1, self.config.head_dim, self.config.hidden)
            layer.get_parameter(_OF_LAYER["qkv"]).copy_(qkv.transpose(0, 1).flatten(0, 2))
            gate_up = [self._shard(weights, f"layers.{i}.{kind}") for kind in ("gate", "up")]
            layer.get_parameter("layernorm_mlp.fc1_weight").copy_(torch.cat(gate_up))

    def _shard(self, weights: Mapping[str, Tensor], name: str) -> Tensor:
        return shard(name, weights[name], self.rank, self.tp_size)
