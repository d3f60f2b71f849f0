"""WHAT USERS CALL: autograd functions and layers."""

from tpoverlap.nn.cross_entropy import vocab_parallel_cross_entropy
from tpoverlap.nn.dtensor import dtensor_state_dict
from tpoverlap.nn.fp8_context import fp8_autocast
from tpoverlap.nn.full_weights import full_weight, load_full_weight
from tpoverlap.nn.functional import all_gather_gemm, bulk_all_gather, bulk_reduce_scatter, gemm_reduce_scatter
from tpoverlap.nn.layer_norm_linear import LayerNormLinear
from tpoverlap.nn.layer_norm_mlp import LayerNormMLP
from tpoverlap.nn.linear import Linear
from tpoverlap.nn.multihead_attention import MultiheadAttention
from tpoverlap.nn.recompute import checkpoint_context_fn
from tpoverlap.nn.replicated import sync_replicated_grads
from tpoverlap.nn.rotary import RotaryTable
from tpoverlap.nn.sequences import PackedSequences
from tpoverlap.nn.shard_spec import ShardSpec
from tpoverlap.nn.transformer_layer import TransformerLayer
from tpoverlap.nn.vocab import VocabParallelEmbedding, VocabParallelHead

__all__ = [
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "PackedSequences",
    "RotaryTable",
    "ShardSpec",
    "TransformerLayer",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "all_gather_gemm",
    "bulk_all_gather",
    "bulk_reduce_scatter",
    "checkpoint_context_fn",
    "dtensor_state_dict",
    "fp8_autocast",
    "full_weight",
    "gemm_reduce_scatter",
    "load_full_weight",
    "sync_replicated_grads",
    "vocab_parallel_cross_entropy",
]
