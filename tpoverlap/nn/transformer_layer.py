"""nn.TransformerLayer: attention and MLP, each with its norm and its residual, on the rank's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tpoverlap.errors import ConfigError
from tpoverlap.gemm.fp8 import Recipe
from tpoverlap.nn.layer_norm_mlp import LayerNormMLP
from tpoverlap.nn.multihead_attention import MultiheadAttention
from tpoverlap.nn.parameters import InitMethod, require_ub_names, resolve_manager
from tpoverlap.nn.rotary import RotaryTable
from tpoverlap.nn.sequences import CuSeqlens, PackedSequences
from tpoverlap.tokens import TokenPartition

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager

_FLAGS = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad")


class TransformerLayer(torch.nn.Module):
    """x = x + attention(norm(x)); x = x + mlp(norm(x)): x_shard [T_r, H] -> [T_r, H], sequences packed (THD).

    Parameters: ``self_attention.`` and those of `MultiheadAttention` (with its norm), ``layernorm_mlp.`` and those of
    `LayerNormMLP`. The residuals stay on shards, so nothing but the four GEMMs communicates.

    Args:
        hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups, kv_channels: H, F, A, G, d.
        layernorm_epsilon, normalization, zero_centered_gamma: of both norms.
        activation: see `tpoverlap.nn.activation`.
        attn_mask_type, rotary_base: see `MultiheadAttention`.
        hidden_dropout, attention_dropout: only 0.
        ub_tp_comm_overlap: False: all five ``ub_*`` flags are False.
        ub_names: layer names of QKV, projection, fc1 and fc2. All layers of a model share these four.
        Others: as `LayerNormLinear`.

    Raises:
        ConfigError: as `MultiheadAttention` and `LayerNormMLP`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        *,
        kv_channels: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        activation: str = "gelu",
        attn_mask_type: str = "causal",
        rotary_base: float | None = None,
        bias: bool = True,
        sequence_parallel: bool = True,
        manager: UserBufferManager | None = None,
        ub_names: tuple[str, str, str, str] = ("qkv", "proj", "fc1", "fc2"),
        tp_group: Any = None,
        tp_size: int | None = None,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        save_gathered: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        ub_tp_comm_overlap: bool = True,
        ub_overlap_ag: bool | None = None,
        ub_overlap_rs: bool | None = None,
        ub_overlap_rs_dgrad: bool | None = None,
        ub_bulk_dgrad: bool | None = None,
        ub_bulk_wgrad: bool | None = None,
        fp8_recipe: Recipe | None = None,
    ) -> None:
        super().__init__()
        if hidden_dropout:
            raise ConfigError(f"hidden_dropout={hidden_dropout} is not supported; set it to 0")
        require_ub_names(ub_names, "QKV", "the projection", "fc1", "fc2")
        self.manager = resolve_manager(manager, tp_group, tp_size)
        flags = (ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad)
        if not ub_tp_comm_overlap:
            wanted = [name for name, flag in zip(_FLAGS, flags, strict=True) if flag]
            if wanted:
                raise ConfigError(f"ub_tp_comm_overlap=False and {wanted[0]}=True contradict each other; set one")
            flags = (False,) * 5
        common: dict[str, Any] = {
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "bias": bias,
            "sequence_parallel": sequence_parallel,
            "manager": self.manager,
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "params_dtype": params_dtype,
            "device": device,
            "save_gathered": save_gathered,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "delay_wgrad_compute": delay_wgrad_compute,
            "fp8_recipe": fp8_recipe,
            **dict(zip(_FLAGS, flags, strict=True)),
        }
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            kv_channels,
            num_gqa_groups=num_gqa_groups,
            attention_dropout=attention_dropout,
            layernorm_epsilon=layernorm_epsilon,
            input_layernorm=True,
            attn_mask_type=attn_mask_type,
            rotary_base=rotary_base,
            ub_names=ub_names[:2],
            **common,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, layernorm_epsilon, activation=activation, ub_names=ub_names[2:], **common
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: CuSeqlens | PackedSequences | None = None,
        *,
        max_seqlen: int | None = None,
        rotary_pos_emb: RotaryTable | None = None,
        partition: TokenPartition | None = None,
    ) -> torch.Tensor:
        """[T_r, H] -> [T_r, H]. Arguments and errors: `MultiheadAttention.forward`."""
        attended = self.self_attention(
            hidden_states, cu_seqlens, max_seqlen=max_seqlen, rotary_pos_emb=rotary_pos_emb, partition=partition
        )
        hidden_states = hidden_states + attended
        y: torch.Tensor = hidden_states + self.layernorm_mlp(hidden_states, partition)
        return y

    def need_backward_dw(self) -> bool:
        """As `ParallelLayer.need_backward_dw`."""
        return self.layernorm_mlp.need_backward_dw()

    def backward_dw(self) -> None:
        """As `ParallelLayer.backward_dw`, of all four GEMMs."""
        self.layernorm_mlp.backward_dw()
        self.self_attention.backward_dw()
