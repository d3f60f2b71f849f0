"""Which option keys each method really reads here. The others are accepted and reported, never silently dropped.

Whoever makes a method read one more key adds it here; the notes, ``explain`` and the tests follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tpoverlap.config.options import OverlapConfig

_ALWAYS: Final = frozenset({"method", "is_reduce_scatter"})

# Switched off, they ask for what happens anyway. (``use_ce: false`` is no such thing: it asks for another copy.)
_EXTRAS: Final = frozenset({"set_sm_margin", "aggregate", "atomic_gemm", "fp8_buf", "pipeline_rs_overlap_first_gemm"})

# Copy blocks on multiprocessors exist only where the copy engine is switched off.
_COPY_BLOCKS: Final = frozenset({"num_sm", "set_sm_margin"})
_COPY_CHOICE_METHODS: Final = ("ring_exchange", "bulk", "auto")

HONOURED: Final[Mapping[str, frozenset[str]]] = {
    # num_splits: the ring forces it to tp_size, which is a finding of its own
    "ring_exchange": _ALWAYS | {"use_ce", "aggregate", "num_splits"},
    "pipeline": _ALWAYS | {"num_splits", "num_max_streams"},
    "bulk": _ALWAYS | {"use_ce"},
    "fused": _ALWAYS | {"num_splits"},
    "sequential": _ALWAYS,
    "auto": _ALWAYS | {"use_ce", "aggregate", "num_splits", "num_max_streams"},  # what any choice of it may read
    "external": _ALWAYS,
}

_BECAUSE: Final[Mapping[str, str]] = {
    "num_sm": "the copy engine moves the rows, so no multiprocessor is taken",
    "cga_size": "no method here launches copy blocks in clusters",
    "set_sm_margin": "the copy engine moves the rows, so the GEMM need not leave a multiprocessor free",
    "num_splits": "only pipeline cuts the GEMM in splits",
    "aggregate": "only a ring_exchange all-gather can double its chunk",
    "atomic_gemm": "it has no tile-by-tile form",
    "use_ce": "only ring_exchange and bulk choose between the copy engine and copy blocks",
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
        return fp8
    if key in _COPY_BLOCKS:
        return config.method in _COPY_CHOICE_METHODS and not config.use_ce
    if key == "aggregate" and config.is_reduce_scatter:
        return False
    return key in HONOURED[config.method]


def why_ignored(config: OverlapConfig, key: str) -> str:
    """One clause: why the method of ``config`` does not read ``key``."""
    if config.method == "sequential" and key != "fp8_buf":
        return "sequential overlaps nothing"
    return _BECAUSE[key]
