"""tpoverlap: hide tensor-parallel communication behind GEMMs while the number of tokens changes.

Importing it touches no GPU, no Triton and no process group.
"""

from typing import Any

from tpoverlap import nn
from tpoverlap.communicator import CommOverlap, CommOverlapP2P, LayerCommunicators
from tpoverlap.config import OverlapConfig
from tpoverlap.errors import (
    ActiveShapeError,
    BackendUnavailableError,
    CapacityError,
    ConfigError,
    NotInitializedError,
    PeerTimeoutError,
    RankMismatchError,
    TpOverlapError,
)
from tpoverlap.gemm.fp8 import DelayedScaling, Float8CurrentScaling, Float8RowwiseScaling, Format, Fp8State
from tpoverlap.manager import UserBufferManager
from tpoverlap.memory_report import memory_estimate
from tpoverlap.nn import (
    all_gather_gemm,
    bulk_all_gather,
    bulk_reduce_scatter,
    checkpoint_context_fn,
    fp8_autocast,
    gemm_reduce_scatter,
    sync_replicated_grads,
)
from tpoverlap.tokens import TokenPartition

__version__ = "0.1.0"

__all__ = [
    "ActiveShapeError",
    "BackendUnavailableError",
    "CapacityError",
    "CommOverlap",
    "CommOverlapP2P",
    "ConfigError",
    "DelayedScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "Fp8State",
    "LayerCommunicators",
    "NotInitializedError",
    "OverlapConfig",
    "PeerTimeoutError",
    "RankMismatchError",
    "TokenPartition",
    "TpOverlapError",
    "UserBufferManager",
    "__version__",
    "all_gather_gemm",
    "bulk_all_gather",
    "bulk_reduce_scatter",
    "checkpoint_context_fn",
    "fp8_autocast",
    "gemm_reduce_scatter",
    "memory_estimate",
    "nn",
    "profile",
    "sync_replicated_grads",
]


def __getattr__(name: str) -> Any:
    """``tpo.profile``, from `tpoverlap.tools.profile.session`: a tool, imported when it is first used."""
    if name == "profile":
        from importlib import import_module

        return import_module("tpoverlap.tools.profile.session").profile
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
