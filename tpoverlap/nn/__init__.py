"""WHAT USERS CALL: autograd functions and layers."""

from tpoverlap.nn.fp8 import fp8_autocast
from tpoverlap.nn.functional import all_gather_gemm, bulk_all_gather, bulk_reduce_scatter, gemm_reduce_scatter
from tpoverlap.nn.linear import Linear
from tpoverlap.nn.recompute import checkpoint_context_fn
from tpoverlap.nn.replicated import sync_replicated_grads

__all__ = [
    "Linear",
    "all_gather_gemm",
    "bulk_all_gather",
    "bulk_reduce_scatter",
    "checkpoint_context_fn",
    "fp8_autocast",
    "gemm_reduce_scatter",
    "sync_replicated_grads",
]
