"""Whether a tensor gets the kernels, and a launch that skips what Triton works out again at every call.

Triton's own launch looks at each argument to find the binary that fits, which takes longer than a small kernel. Here a
launch whose pointers are all aligned finds its binary by one look-up; any other launch goes Triton's way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import torch

from tpoverlap.gemm.triton import kernels_missing

logger = logging.getLogger("tpoverlap")

DTYPES: Final = frozenset((torch.bfloat16, torch.float16, torch.float32))
"""What the kernels take: they compute in float32. (float64 is for the twins.)"""
ALIGNED_BYTES: Final = 16
_INT32_MAX: Final = (1 << 31) - 1


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether ``x`` gets a kernel: on CUDA, in one of `DTYPES`, and no compiler is tracing (which fuses the twin)."""
    return x.is_cuda and x.dtype in DTYPES and _kernels_run(x.device) and not torch.compiler.is_compiling()


@lru_cache(maxsize=16)
def _kernels_run(device: torch.device) -> bool:
    missing = kernels_missing(device)
    if missing is not None:
        logger.warning(
            "%s: activations and rotary positions run as several torch operations instead of one kernel each: %s",
            device,
            missing,
        )
    return missing is None


def vector_unit(*strides: int) -> int:
    """8 if all of these, in elements, are multiples of 8, else 1: a kernel's constant that says what is aligned."""
    combined = 0
    for stride in strides:
        combined |= stride
    return 8 if combined % 8 == 0 else 1


class DirectKernel:
    """One Triton kernel, and its binaries by what they depend on. Arguments: pointers, then integers, then constants.

    The kernel has to leave all its integers unspecialised, so that a binary depends on the dtype, the constants and the
    alignment of pointers only. Other tensors' dtypes must follow from the first one's and the constants.

    Args:
        function: Triton's.
        num_warps: of each program.
    """

    def __init__(self, function: Any, num_warps: int) -> None:
        self._function, self._num_warps = function, num_warps
        self._binaries: dict[tuple[Any, ...], Any] = {}

    def launch(
        self, programs: int, tensors: Sequence[torch.Tensor], integers: Sequence[int], constants: tuple[Any, ...]
    ) -> None:
        """Launch on the current stream of the first tensor's device. ``programs`` may be 0: nothing happens."""
        first = tensors[0]
        if programs == 0:
            return
        if programs > _INT32_MAX:
            raise OverflowError(f"{self._function.__name__}: {programs} programs; cut the rows in parts")
        if first.is_cuda and first.device.index != torch.cuda.current_device():
            with torch.cuda.device(first.device):
                self.launch(programs, tensors, integers, constants)
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        if _fits_binary(addresses, integers):
            key = (first.device, first.dtype, constants)
            binary = self._binaries.get(key)
            if binary is not None:
                binary[(programs, 1, 1)](*addresses, *integers, *constants)
                return
            binary = self._launch_slowly(programs, tensors, integers, constants)
            if binary is not None:  # the interpreter has none
                self._binaries[key] = binary
            return
        self._launch_slowly(programs, tensors, integers, constants)

    def _launch_slowly(
        self, programs: int, tensors: Sequence[torch.Tensor], integers: Sequence[int], constants: tuple[Any, ...]
    ) -> Any:
        return self._function[(programs,)](*tensors, *integers, *constants, num_warps=self._num_warps)


def _fits_binary(addresses: Sequence[int], integers: Sequence[int]) -> bool:
    """Whether a binary that was made for aligned pointers and 32-bit integers takes these."""
    bits = 0
    for address in addresses:
        bits |= address
    return bits % ALIGNED_BYTES == 0 and max(integers) <= _INT32_MAX
