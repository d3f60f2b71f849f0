"""What a manager needs to know before it allocates: group, device, time-out, and whether its arguments are legal."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from tpoverlap.errors import (
    ActiveShapeError,
    BackendUnavailableError,
    ConfigError,
    NotInitializedError,
)
from tpoverlap.gemm.fp8 import require_device
from tpoverlap.settings import Registration
from tpoverlap.tokens import as_int

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BACKENDS = ("auto", "shared", "cuda", "process_group")
OVERFLOW_MODES = ("error", "sequential")
QUANTIZATION_MODES = ("none", "fp8")
DEFAULT_TIMEOUT_S = 1800.0
MAX_TIMEOUT_S = 30 * 86400.0


def resolve_group(group: Any) -> ProcessGroup:
    """The process group of ``group``: a ProcessGroup, a 1-D DeviceMesh, or None for the default group."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if not dist.is_available() or not dist.is_initialized():
        raise NotInitializedError(
            "torch.distributed is not initialised: call init_process_group (or use torchrun) first"
        )
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]  # not None once initialised
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ConfigError(f"group must be a 1-D DeviceMesh, got {group.ndim} dimensions; pass mesh['tp']")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"group must be a ProcessGroup or a 1-D DeviceMesh, got {type(group).__name__}")
    return group


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """An explicit device with an index; None: this process's current GPU if there is any, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device must be a cpu or cuda device, got {device!r}: {error}") from error
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be a cpu or cuda device, got {resolved}")
    if resolved.type == "cpu":
        return torch.device("cpu")  # tensors on the CPU carry no index
    count = torch.cuda.device_count()
    if count == 0 or (resolved.index or 0) >= count:
        raise BackendUnavailableError(f"device={str(device)!r} was asked for, but torch sees {count} CUDA devices")
    return torch.device("cuda", torch.cuda.current_device()) if resolved.index is None else resolved


def resolve_timeout(timeout_s: float | None, group: ProcessGroup, device: torch.device) -> float:
    """``timeout_s``, or the group's own time-out: a healthy rank may write a checkpoint for minutes."""
    if timeout_s is None:
        try:
            group_timeout: timedelta = group._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):
            return DEFAULT_TIMEOUT_S
        return min(group_timeout.total_seconds(), MAX_TIMEOUT_S)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ConfigError(
            f"timeout_s must be a positive number of seconds, at most {MAX_TIMEOUT_S:g}, got {timeout_s!r}"
        )
    return float(timeout_s)


def parse_capacity(capacity_shape: Any) -> tuple[int, int]:
    """(C, H) as positive integers.

    Raises:
        ActiveShapeError: not two positive integers.
    """
    try:
        dims = [as_int(length) for length in capacity_shape]
    except TypeError:  # no sequence
        dims = []
    if len(dims) != 2:
        raise ActiveShapeError(f"the capacity must be (C, H), two integers, got {capacity_shape!r}")
    tokens, width = dims
    if tokens is None or width is None or min(tokens, width) < 1:
        raise ActiveShapeError(f"the capacity must be (C, H), integers of at least 1, got {capacity_shape!r}")
    return tokens, width


def require_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ConfigError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is not supported; use one of {', '.join(map(str, choices))}")


def parse_max_rows(max_rows_per_rank: Any, max_tokens: int, tp_size: int) -> int:
    """The most rows of one rank: as given, or ceil(max_tokens / R), which every balanced partition fits."""
    if max_rows_per_rank is None:
        return -(-max_tokens // tp_size)
    if isinstance(max_rows_per_rank, bool) or not isinstance(max_rows_per_rank, int) or max_rows_per_rank < 1:
        raise ConfigError(f"max_rows_per_rank must be a positive integer, got {max_rows_per_rank!r}")
    return min(max_rows_per_rank, max_tokens)


def parse_registration(
    name: str, width: int, max_tokens: int | None, max_rows: int | None, own: tuple[int, int], tp_size: int
) -> Registration:
    """A further name's width, capacity and rows; None takes the manager's ``own`` (capacity, rows a rank)."""
    own_tokens, own_rows = own
    tokens, width = parse_capacity((own_tokens if max_tokens is None else max_tokens, width))
    rows = parse_max_rows(max_rows, tokens, tp_size)
    if max_rows is None and own_rows > parse_max_rows(None, own_tokens, tp_size):
        rows = max(rows, min(tokens, own_rows))  # uneven partitions are expected here
    return Registration(name, width, tokens, rows)


def parse_modes(quantization_modes: Any, device: torch.device) -> tuple[str, ...]:
    """Which of "none" and "fp8" are asked for, in this order; nothing asked for is "none".

    Raises:
        ConfigError: an unknown mode, or one that the device cannot compute with.
    """
    given = quantization_modes if isinstance(quantization_modes, list | tuple) else [quantization_modes]
    names = ["none" if mode is None else str(getattr(mode, "name", mode)).lower() for mode in given] or ["none"]
    for mode, name in zip(given, names, strict=False):
        if name not in QUANTIZATION_MODES:
            raise ConfigError(f"quantization mode {mode!r} is unknown; use NONE, FP8 or both")
    if "fp8" in names:
        require_device(device)
    return tuple(mode for mode in QUANTIZATION_MODES if mode in names)


def require_fp8(name: str, modes: tuple[str, ...]) -> None:
    """Raise ConfigError unless FP8 is among the manager's quantization ``modes``."""
    if "fp8" not in modes:
        raise ConfigError(
            f"{name}: FP8 was asked for, but this manager has quantization_modes={list(modes)}; create it with "
            "quantization_modes=['none', 'fp8']"
        )


def refused_input(x: Any, what: str, dtype: torch.dtype, device: torch.device) -> ActiveShapeError:
    """The error for an input that is not 2-D, or not in the manager's dtype and on its device."""
    if not isinstance(x, torch.Tensor):
        return ActiveShapeError(f"{what} must be a tensor [tokens, features], got {type(x).__name__}")
    if x.dim() != 2:
        return ActiveShapeError(
            f"{what} must be 2-D [tokens, features], got {list(x.shape)}; flatten batch and sequence"
        )
    if x.dtype != dtype:
        return ActiveShapeError(f"{what} is {x.dtype}, but the manager communicates {dtype}; cast it")
    return ActiveShapeError(f"{what} is on {x.device}, but the manager is on {device}; move it")
