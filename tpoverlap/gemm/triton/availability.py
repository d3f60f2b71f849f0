"""Whether Triton kernels can run on a device, and if not, what is missing."""

from __future__ import annotations

from functools import lru_cache

import torch

from tpoverlap.errors import BackendUnavailableError

_OLDEST_CAPABILITY = (8, 0)


@lru_cache(maxsize=16)
def kernels_missing(device: torch.device) -> str | None:
    """None when the kernels run on ``device``, else what is missing.

    On the CPU they run in Triton's interpreter only, which is for tests: it has to be on when Triton is imported.
    """
    try:
        from triton import knobs
    except ImportError as error:
        return f"Triton 3.6 or later cannot be imported ({error}); pip install triton"
    interpreted = bool(knobs.runtime.interpret)
    if device.type == "cpu":
        return None if interpreted else "the CPU runs Triton kernels only in the interpreter (TRITON_INTERPRET=1, slow)"
    if interpreted:
        return "TRITON_INTERPRET=1 is set, and the interpreter's host copies see no peer's writes; unset it"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_CAPABILITY:
        return f"{device} has compute capability {capability[0]}.{capability[1]}, these kernels need 8.0"
    return None


def require_kernels(device: torch.device, what: str) -> None:
    """Raise BackendUnavailableError, which names ``what`` needs them, unless `kernels_missing` is None."""
    missing = kernels_missing(device)
    if missing is not None:
        raise BackendUnavailableError(f"{what} needs Triton kernels: {missing}, or configure another method")
