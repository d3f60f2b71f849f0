"""Transformer Engine's names on tpoverlap's default manager.

For layers that call tpoverlap. Transformer Engine's *own* layers keep using Transformer Engine's own buffers: importing
this module does not change them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch

from tpoverlap.communicator import CommOverlap, CommOverlapP2P
from tpoverlap.default_manager import (
    close_default_manager,
    default_manager,
    has_default_manager,
    set_default_manager,
)
from tpoverlap.errors import ConfigError
from tpoverlap.gemm.fp8 import DelayedScaling, Float8CurrentScaling, Format
from tpoverlap.manager import UserBufferManager
from tpoverlap.nn.fp8_context import fp8_autocast
from tpoverlap.settings import TpSize, require_agreement
from tpoverlap.setup import resolve_group
from tpoverlap.tokens import as_int

__all__ = [
    "CommOverlap",
    "CommOverlapP2P",
    "CommOverlapType",
    "DelayedScaling",
    "Float8CurrentScaling",
    "Format",
    "UserBufferQuantizationMode",
    "destroy_ub",
    "fp8_autocast",
    "get_manager",
    "get_ub",
    "initialize_ub",
    "is_ub_initialized",
    "set_ub_active_shape",
]

logger = logging.getLogger("tpoverlap")
_LAYERS = ("Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer")


def __getattr__(name: str) -> Any:
    if name in _LAYERS:
        raise AttributeError(f"tpoverlap.te has the names of the buffers; the layer is tpoverlap.nn.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class UserBufferQuantizationMode(Enum):
    """Whether a buffer holds quantised bytes."""

    NONE = "none"
    FP8 = "fp8"


class CommOverlapType(Enum):
    """Direction of an overlap."""

    AG = 0
    RS = 1


def initialize_ub(
    shape: Sequence[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: list[UserBufferQuantizationMode] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: Any = None,
    bootstrap_backend: str | None = None,
    with_cublasmp: bool = False,
    *,
    tp_group: Any = None,
    **options: Any,
) -> UserBufferManager:
    """Register the default manager's buffers at capacity ``shape`` = [C, H].

    Collective over ``tp_group``; without one, over the default group, as in Transformer Engine.

    Args:
        shape: the capacity; microbatches set less with `set_ub_active_shape`.
        tp_size: must be the size of ``tp_group``.
        use_fp8, quantization_modes: FP8, [NONE] or [NONE, FP8]; both modes share the same regions.
        ub_cfgs: options by name; a list may have one a mode, but the modes share names, so they have to be equal.
        bootstrap_backend, with_cublasmp: accepted, reported as ignored: set-up uses the process group itself.
        tp_group: ours: the tensor-parallel group; None: the default group, if it has tp_size ranks, else the block of
            tp_size consecutive ranks that this rank belongs to (as Transformer Engine does).
        options: further arguments of `UserBufferManager` (``device=``, ``timeout_s=``, ...).

    Raises:
        ConfigError: initialised already, FP8 asked for on a device without it, other options for one mode than for
            another, or tp_size is not the group's size.
    """
    if has_default_manager():
        raise ConfigError("initialize_ub was called twice: call destroy_ub() first")
    modes = list(quantization_modes or [])
    if use_fp8 and not modes:
        modes.append(UserBufferQuantizationMode.FP8)
    for name, value in (("bootstrap_backend", bootstrap_backend), ("with_cublasmp", with_cublasmp)):
        if value:
            logger.warning("initialize_ub: %s=%r is ignored: set-up goes through the process group", name, value)
    wrong = None
    if isinstance(ub_cfgs, list | tuple):
        wrong = _unless_equal(ub_cfgs)
        ub_cfgs = ub_cfgs[0] if ub_cfgs else None
    manager = UserBufferManager(
        _tp_group(tp_group, tp_size, wrong),
        shape,  # type: ignore[arg-type]  # any sequence; the manager refuses what is not (C, H), on every rank
        dtype,
        ub_cfgs=ub_cfgs,
        quantization_modes=modes,
        **options,
    )
    set_default_manager(manager)
    return manager


def _unless_equal(ub_cfgs: Sequence[Any]) -> ConfigError | None:
    """The error for a list, one configuration a quantization mode, that are not the same."""
    if all(one == ub_cfgs[0] for one in ub_cfgs[1:]):
        return None
    return ConfigError(
        f"ub_cfgs has {len(ub_cfgs)} different configurations, one a quantization mode, but the modes share names "
        "and options here; pass one, with fp8_buf where FP8 rows should be reduce-scattered"
    )


def _tp_group(tp_group: Any, tp_size: int, wrong: ConfigError | None) -> Any:
    import torch.distributed as dist

    group = resolve_group(tp_group)
    size = group.size()
    size_as_int = as_int(tp_size)
    if size_as_int is None or size_as_int < 1:
        wrong = ConfigError(f"tp_size must be a whole number of at least 1, got {tp_size!r}")
    elif tp_group is not None and size != tp_size:
        wrong = ConfigError(f"tp_size={tp_size}, but tp_group has {size} ranks; pass the group's size")
    elif size % size_as_int:
        wrong = ConfigError(f"{size} ranks cannot be cut into groups of tp_size={tp_size}; pass tp_group=")
    # Compared on every rank: one that raised at once would leave its peers waiting for it.
    require_agreement(group, TpSize(tp_size) if wrong is None else wrong)
    if size == tp_size:
        return group
    first = group.rank() // tp_size * tp_size
    return dist.new_group(list(range(first, first + tp_size)), use_local_synchronization=True)


def get_manager() -> UserBufferManager:
    """The default manager. Raises NotInitializedError before `initialize_ub`."""
    return default_manager()


def set_ub_active_shape(shape: Sequence[int]) -> None:
    """[T, H] of the next operations on all buffers. Local, asynchronous."""
    get_manager().set_active_shape(shape)


def get_ub(name: str, use_fp8: bool = False) -> CommOverlap:
    """The communicator of a GEMM name; ``use_fp8``: the one whose buffer holds FP8 rows, as uint8.

    Raises:
        ConfigError: no such name, or `initialize_ub` was not given the FP8 mode.
    """
    return get_manager().get(name, quantised=use_fp8)


def is_ub_initialized() -> bool:
    """Whether `initialize_ub` was called and `destroy_ub` was not."""
    return has_default_manager()


def destroy_ub() -> None:
    """Free the default manager. Collective; nothing happens when there is none."""
    close_default_manager()
