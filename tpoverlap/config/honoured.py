"""Which option keys each method really reads, here and in Transformer Engine. Keys not read are accepted and reported.

Whoever makes a method read one more key adds it here; the notes, ``explain`` and the tests follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tpoverlap.config.options import OverlapConfig

_ALWAYS: Final = frozenset({"method", "is_reduce_scatter"})

# Switched off, they ask for what happens anyway. (``use_ce: false`` is no such thing: it asks for another copy.)
FP8_SCATTERS: Final = ("ring_exchange", "pipeline", "auto")
"""Methods whose reduce-scatter can move FP8 rows (``fp8_buf``)."""
_EXTRAS: Final = frozenset({"set_sm_margin", "aggregate", "atomic_gemm", "fp8_buf", "pipeline_rs_overlap_first_gemm"})

# Copy blocks on multiprocessors exist only where the copy engine is switched off.
# Only a kernel of ours can leave multiprocessors to them: cuBLAS takes all.
_COPY_BLOCKS: Final[Mapping[str, tuple[str, ...]]] = {
    "num_sm": ("ring_exchange", "bulk", "fused", "auto"),
    "set_sm_margin": ("fused",),
}

HONOURED: Final[Mapping[str, frozenset[str]]] = {
    # num_splits: the ring forces it to tp_size, which is a finding of its own
    # atomic_gemm: selects fused
    "ring_exchange": _ALWAYS | {"use_ce", "aggregate", "num_splits", "atomic_gemm"},
    "pipeline": _ALWAYS | {"num_splits", "num_max_streams", "atomic_gemm"},
    "bulk": _ALWAYS | {"use_ce"},
    "fused": _ALWAYS | {"use_ce", "num_splits", "atomic_gemm"},
    "sequential": _ALWAYS,
    "auto": _ALWAYS
    | {"use_ce", "aggregate", "num_splits", "num_max_streams", "atomic_gemm"},  # what any choice of it may read
    "external": _ALWAYS,
}

_BECAUSE: Final[Mapping[str, str]] = {
    "num_sm": "the copy engine moves the rows, so no multiprocessor is taken",
    "cga_size": "no method here launches copy blocks in clusters",
    "set_sm_margin": "the copy engine moves the rows, so the GEMM need not leave a multiprocessor free",
    "num_splits": "only pipeline cuts the GEMM in splits",
    "aggregate": "only a ring_exchange all-gather can double its chunk",
    "atomic_gemm": "it has no tile-by-tile form",
    "use_ce": "only ring_exchange, bulk and fused choose between the copy engine and copy blocks",
    "fp8_buf": "it is about FP8 buffers, and these buffers are not FP8",
    "comm_priority": "the copies of all names share one stream of high priority",
    "gemm_priority": "GEMMs run on the caller's stream, and on streams of normal priority beside it",
    "pipeline_rs_overlap_first_gemm": "every split travels as soon as it is computed, the first one too",
    "num_max_streams": "only pipeline spreads its splits over several streams",
}


def is_honoured(config: OverlapConfig, key: str, fp8: bool = False) -> bool:
    """Whether the method of ``config`` reads ``key``, in this direction and with these buffers."""
    if key in _EXTRAS and not getattr(config, key):
        return True
    if key == "fp8_buf":
        return fp8 and (not config.is_reduce_scatter or config.method in FP8_SCATTERS)
    if key in _COPY_BLOCKS:
        return config.method in _COPY_BLOCKS[key] and not config.use_ce
    if key == "aggregate" and config.is_reduce_scatter:
        return False
    return key in HONOURED[config.method]


def why_ignored(config: OverlapConfig, key: str) -> str:
    """One clause: why the method of ``config`` does not read ``key``."""
    if config.method == "sequential" and key != "fp8_buf":
        return "sequential overlaps nothing"
    if key == "set_sm_margin" and not config.use_ce:
        return "its GEMM is cuBLAS's, which takes every multiprocessor; only method fused can leave some free"
    if key == "fp8_buf" and config.is_reduce_scatter and config.method not in FP8_SCATTERS:
        return "only ring_exchange and pipeline reduce-scatter FP8 rows; it moves sums in the original dtype"
    return _BECAUSE[key]


def is_idle_in_te(config: OverlapConfig, key: str) -> bool:
    """Whether ``key`` does nothing in Transformer Engine, for which ``config`` has the defaults filled in."""
    ring = config.method == "ring_exchange"
    match key:
        case "cga_size":
            return ring and config.use_ce
        case "num_sm":
            return ring and config.use_ce and not config.set_sm_margin
        case "aggregate":
            return config.aggregate and not (ring and not config.is_reduce_scatter)
        case "num_splits":
            return config.method == "bulk"
        case "use_ce":
            return not ring and config.use_ce is False
        case "pipeline_rs_overlap_first_gemm":
            return config.pipeline_rs_overlap_first_gemm and config.method != "pipeline"
    return False
