"""nn.MultiheadAttention: column-parallel QKV, packed attention on local heads, row-parallel projection."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from tpoverlap.errors import ConfigError, TpOverlapError
from tpoverlap.nn.agreement import agreeing_on
from tpoverlap.nn.autograd import is_compiling, uncompiled
from tpoverlap.nn.elementwise import HeadLayout
from tpoverlap.nn.inputs import note_refusal
from tpoverlap.nn.layer_norm_linear import LayerNormLinear
from tpoverlap.nn.linear import Linear
from tpoverlap.nn.parallel_layer import Output
from tpoverlap.nn.parameters import (
    InitMethod,
    describe_parameter,
    divided,
    require_positive,
    require_sizes,
    require_ub_names,
    resolve_manager,
)
from tpoverlap.nn.qkv_attention import qkv_attention
from tpoverlap.nn.rotary import RotaryTable
from tpoverlap.nn.sequences import CuSeqlens, PackedSequences, packed_sequences
from tpoverlap.nn.shard_spec import ShardSpec
from tpoverlap.nn.split_qkv import require_table
from tpoverlap.tokens import TokenPartition

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager

logger = logging.getLogger("tpoverlap")
_ONE_SEQUENCE = (
    "attention without cu_seqlens: all T=%d rows are one sequence, also where they are of several documents; pass "
    "cu_seqlens=[0, ..., T], or [0, T] if that is meant (said once)"
)
_CAUSAL = {"causal": True, "padding_causal": True, "no_mask": False, "padding": False}


class MultiheadAttention(torch.nn.Module):
    """y = attention(norm(x) Wqkv^T) Wproj^T: x_shard [T_r, H] -> y_shard [T_r, H], sequences packed (THD).

    A = num_attention_heads, G = num_gqa_groups, d = kv_channels.

    ==================================  =======================  ==================================================
    parameter                           shape on rank r          layout
    ==================================  =======================  ==================================================
    ``layernorm_qkv.layer_norm_*``      [H]                      replicated; only with ``input_layernorm``
    ``layernorm_qkv.weight``, or        [(A + 2 G) d / R, H]     group by group: its A / G query heads, its key
    ``qkv.weight`` without a norm                                head, its value head (Megatron's order): any R
                                                                 cuts the full weight in R blocks of rows
    ``...bias``                         [(A + 2 G) d / R]        as the weight's rows
    ``proj.weight``                     [H, A d / R]             columns of this rank's heads
    ``proj.bias``                       [H]                      replicated: call `sync_replicated_grads`
    ==================================  =======================  ==================================================

    What hides behind what: QKV as `tpoverlap.nn.column`, projection as `tpoverlap.nn.row`; nothing beside attention.

    Args:
        hidden_size: H. num_attention_heads: A. num_gqa_groups: G; None: A.
        kv_channels: d; None: H / A.
        input_layernorm: normalise x first.
        attn_mask_type: "causal" or "padding_causal" (the same here: sequences are packed), "no_mask" or "padding".
        rotary_base: turn queries and keys by their position (RoPE) with this base; None: only if ``rotary_pos_emb`` is
            given to forward.
        layernorm_epsilon, normalization, zero_centered_gamma: of the input norm.
        init_method, output_layer_init_method: of the QKV and of the projection weight.
        ub_names: layer names of QKV and projection.
        Others: as `LayerNormLinear`. ``return_layernorm_output`` needs ``input_layernorm``.

    Raises:
        ConfigError: as `LayerNormLinear`; A or G is not divisible by R, A not by G; dropout; an unknown mask.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        *,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        layernorm_epsilon: float = 1e-5,
        input_layernorm: bool = False,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        attn_mask_type: str = "causal",
        rotary_base: float | None = None,
        bias: bool = True,
        sequence_parallel: bool = True,
        manager: UserBufferManager | None = None,
        ub_names: tuple[str, str] = ("qkv", "proj"),
        tp_group: Any = None,
        tp_size: int | None = None,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        **gemm_options: Any,
    ) -> None:
        super().__init__()
        self.manager = resolve_manager(manager, tp_group, tp_size)
        require_sizes(hidden_size=hidden_size)
        if kv_channels is not None:
            require_sizes(kv_channels=kv_channels)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.num_heads = divided("num_attention_heads", num_attention_heads, self.manager)
        self.num_groups = divided("num_gqa_groups", groups, self.manager)
        _require_heads(hidden_size, num_attention_heads, groups, kv_channels, attention_dropout, attn_mask_type)
        self.head_dim = hidden_size // num_attention_heads if kv_channels is None else kv_channels
        require_ub_names(ub_names, "QKV", "the projection")
        if rotary_base is not None:
            require_positive("rotary_base", rotary_base)
        if rotary_base is not None and self.head_dim % 2:
            raise ConfigError(f"rotary positions turn pairs of features, but a head has kv_channels={self.head_dim}")
        self._heads = HeadLayout(self.num_groups, self.num_heads // self.num_groups, self.head_dim)
        self.causal, self.rotary_base = _CAUSAL[attn_mask_type], rotary_base
        self._returns_norm = return_layernorm_output or return_layernorm_output_gathered
        common = {"bias": bias, "sequence_parallel": sequence_parallel, "manager": self.manager, **gemm_options}
        features = (num_attention_heads + 2 * groups) * self.head_dim
        self.layernorm_qkv: LayerNormLinear | None = None
        self.qkv: Linear | None = None
        if input_layernorm:
            self.layernorm_qkv = LayerNormLinear(
                hidden_size,
                features,
                layernorm_epsilon,
                normalization=normalization,
                zero_centered_gamma=zero_centered_gamma,
                ub_name=ub_names[0],
                init_method=init_method,
                return_layernorm_output=return_layernorm_output,
                return_layernorm_output_gathered=return_layernorm_output_gathered,
                **common,
            )
        else:
            if self._returns_norm:
                raise ConfigError("return_layernorm_output=True needs input_layernorm=True: there is no norm here")
            self.qkv = Linear(
                hidden_size, features, parallel_mode="column", ub_name=ub_names[0], init_method=init_method, **common
            )
        _describe_qkv(self.layernorm_qkv or self.qkv, num_attention_heads * self.head_dim, groups, self.head_dim)
        self.proj = Linear(
            num_attention_heads * self.head_dim,
            hidden_size,
            parallel_mode="row",
            ub_name=ub_names[1],
            init_method=output_layer_init_method,
            return_bias=return_bias,
            **common,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: CuSeqlens | PackedSequences | None = None,
        *,
        max_seqlen: int | None = None,
        rotary_pos_emb: RotaryTable | None = None,
        partition: TokenPartition | None = None,
    ) -> Output:
        """[T_r, H] -> [T_r, H]; with ``return_bias`` and ``return_layernorm_output`` (y, bias, norm(x)).

        Args:
            hidden_states: this rank's rows.
            cu_seqlens: see `PackedSequences`; None: all T rows are one sequence, which a log line says once a manager.
            max_seqlen: the longest sequence; saves a wait where ``cu_seqlens`` is on the GPU.
            rotary_pos_emb: RoPE table of all T rows, to share it between layers.
            partition: rows of each rank; None: the active shape.

        Raises:
            ActiveShapeError: ``cu_seqlens`` does not describe the T rows, or ``rotary_pos_emb`` is not of their shape;
                others as `all_gather_gemm`.
        """
        if is_compiling():
            options = {"max_seqlen": max_seqlen, "rotary_pos_emb": rotary_pos_emb, "partition": partition}
            return uncompiled(MultiheadAttention.forward, self, hidden_states, cu_seqlens, **options)
        num_tokens = self._num_tokens(hidden_states, partition)
        if cu_seqlens is None:
            cu_seqlens = (0, num_tokens)
            if _ONE_SEQUENCE not in self.manager.said:
                self.manager.said.add(_ONE_SEQUENCE)
                if self.manager.rank == 0:
                    logger.warning(_ONE_SEQUENCE, num_tokens)
        try:
            sequences = packed_sequences(cu_seqlens, num_tokens, hidden_states.device, max_seqlen)
            if rotary_pos_emb is not None:
                require_table(rotary_pos_emb, num_tokens, self.head_dim)
        except TpOverlapError as error:
            note_refusal(self.manager, error)
            raise
        projection = self.layernorm_qkv
        if projection is None:
            projection = self.qkv  # type: ignore[assignment]  # the same call
        assert projection is not None, "one of the two was made"
        with agreeing_on(sequences.agreement):
            mixed = projection(hidden_states, partition)
        normed: tuple[torch.Tensor, ...] = ()
        if self._returns_norm:
            mixed, *rest = mixed
            normed = tuple(rest)
        attended = self._attend(mixed, sequences, rotary_pos_emb)
        with agreeing_on(sequences.agreement):  # without sequence parallelism the first that communicates
            y = self.proj(attended, partition)
        if not normed:
            return y  # type: ignore[no-any-return]  # a module's call is untyped
        return (*y, *normed) if isinstance(y, tuple) else (y, *normed)

    def _attend(self, mixed: torch.Tensor, sequences: PackedSequences, rotary: RotaryTable | None) -> torch.Tensor:
        """[T, (A + 2 G) d / R] -> [T, A d / R]."""
        if rotary is None and self.rotary_base is not None:
            rotary = sequences.rotary(self.head_dim, self.rotary_base)
        return qkv_attention(mixed, rotary, self._heads, sequences, causal=self.causal)

    def _num_tokens(self, x: torch.Tensor, partition: TokenPartition | None) -> int:
        """T, before anything is communicated: an error about ``cu_seqlens`` must not leave the other ranks waiting."""
        if partition is None:
            partition = (self.layernorm_qkv or self.qkv or self.proj).comm.fprop.partition
        if isinstance(partition, TokenPartition):
            return partition.total
        return x.shape[0] * (self.manager.tp_size if self.proj.sequence_parallel else 1)

    def need_backward_dw(self) -> bool:
        """As `ParallelLayer.need_backward_dw`."""
        return self.proj.need_backward_dw()

    def backward_dw(self) -> None:
        """As `ParallelLayer.backward_dw`, of both GEMMs."""
        self.proj.backward_dw()
        for projection in (self.layernorm_qkv, self.qkv):
            if projection is not None:
                projection.backward_dw()


def _describe_qkv(projection: LayerNormLinear | Linear | None, query: int, groups: int, head_dim: int) -> None:
    """To the projection its rows are rows; which belong to queries, keys and values is known here."""
    assert projection is not None, "one of the two was made"
    parts = (("query", query), ("key", groups * head_dim), ("value", groups * head_dim))
    for name in ("weight", "bias"):
        if name in projection.shard_specs:
            spec = projection.shard_specs[name]
            describe_parameter(projection, name, ShardSpec(spec.full_shape, spec.dim, parts, groups))


def _require_heads(
    hidden_size: int, heads: int, groups: int, kv_channels: int | None, dropout: float, mask_type: str
) -> None:
    if heads % groups:
        raise ConfigError(f"num_attention_heads={heads} is not divisible by num_gqa_groups={groups}")
    if kv_channels is None and hidden_size % heads:
        raise ConfigError(
            f"hidden_size={hidden_size} is not divisible by num_attention_heads={heads}; give kv_channels"
        )
    if dropout:
        raise ConfigError(f"attention_dropout={dropout} is not supported; set it to 0")
    if mask_type not in _CAUSAL:
        raise ConfigError(f"attn_mask_type={mask_type!r} is not known; use one of {', '.join(_CAUSAL)}")
