"""Which option keys each method really reads here. The others are accepted and reported, never silently dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tpoverlap.config.options import OPTION_KEYS, OverlapConfig

_ALWAYS: Final = frozenset({"method", "is_reduce_scatter"})
_PRIORITIES: Final = frozenset({"comm_priority", "gemm_priority"})

# Switched off, they ask for what happens anyway. (``use_ce: false`` is no such thing: it asks for another copy.)
_EXTRAS: Final = frozenset({"set_sm_margin", "aggregate", "atomic_gemm", "fp8_buf", "pipeline_rs_overlap_first_gemm"})

HONOURED: Final[Mapping[str, frozenset[str]]] = {
    # num_splits: the ring forces it to tp_size, which is a finding of its own
    "ring_exchange": _ALWAYS | _PRIORITIES | {"use_ce", "num_splits"},
    "pipeline": _ALWAYS
    | _PRIORITIES
    | {"num_sm", "set_sm_margin", "num_splits", "num_max_streams", "pipeline_rs_overlap_first_gemm"},
    # the independent GEMM runs on the caller's stream, whose priority is the caller's
    "bulk": _ALWAYS | {"num_sm", "set_sm_margin", "use_ce", "comm_priority"},
    "fused": _ALWAYS | _PRIORITIES | {"num_sm", "set_sm_margin", "num_splits"},
    "sequential": _ALWAYS,
    "auto": frozenset(OPTION_KEYS),  # any of them may be read, by the method that the dispatcher chooses
    "external": _ALWAYS,
}

_BECAUSE: Final[Mapping[str, str]] = {
    "num_sm": "the copy engine moves the rows while use_ce is true, so no multiprocessor is taken",
    "cga_size": "no method here launches copy blocks in clusters",
    "set_sm_margin": "its copies take no multiprocessor that the GEMM would have to leave free",
    "num_splits": "only pipeline cuts the GEMM in splits",
    "aggregate": "only a ring_exchange all-gather can double its chunk",
    "atomic_gemm": "it has no tile-by-tile form",
    "use_ce": "only ring_exchange and bulk choose between the copy engine and copy blocks",
    "fp8_buf": "it is about FP8 buffers, and these buffers are not FP8",
    "comm_priority": "it puts nothing on a stream of its own",
    "gemm_priority": "its GEMM runs on the caller's stream",
    "pipeline_rs_overlap_first_gemm": "only pipeline has a first split to overlap",
    "num_max_streams": "only pipeline spreads its splits over several streams",
}


def is_honoured(config: OverlapConfig, key: str, fp8: bool = False) -> bool:
    """Whether the method of ``config`` reads ``key``, in this direction and with these buffers."""
    if key in _EXTRAS and not getattr(config, key):
        return True
    if key == "fp8_buf":
        return fp8
    if config.method == "ring_exchange":
        if key == "num_sm":
            return not config.use_ce
        if key == "aggregate":
            return not config.is_reduce_scatter
    return key in HONOURED[config.method]


def why_ignored(config: OverlapConfig, key: str) -> str:
    """One clause: why the method of ``config`` does not read ``key``."""
    if config.method == "sequential" and key != "fp8_buf":
        return "sequential overlaps nothing"
    return _BECAUSE[key]
