"""Whether a tensor gets the kernels, and their launch: by one look-up (`tpoverlap.gemm.triton.direct`) where all
pointers are aligned; any other launch goes Triton's way.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import Any, Final

import torch

from tpoverlap.gemm.triton import kernels_missing
from tpoverlap.gemm.triton.direct import DirectKernels, Launch, current_device, direct_kernels

logger = logging.getLogger("tpoverlap")

DTYPES: Final = frozenset((torch.bfloat16, torch.float16, torch.float32))
"""What the kernels take: they compute in float32. (float64 is for the twins.)"""
ALIGNED_BYTES: Final = 16
_INT32_MAX: Final = (1 << 31) - 1
_address = torch.Tensor.data_ptr


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
    """One Triton kernel, launched by look-up. Arguments: pointers, then integers, then constants.

    The kernel has to leave all its integers unspecialised, so that a binary depends on the dtype, the constants and the
    alignment of pointers only. Other tensors' dtypes must follow from the first one's and the constants.

    Args:
        function: Triton's.
        num_warps: of each program.
        kernels: instead of the device's (tests).
    """

    def __init__(self, function: Any, num_warps: int, kernels: DirectKernels | None = None) -> None:
        self._function, self._num_warps = function, num_warps
        self._kernels = kernels
        self._ready: dict[Hashable, Launch | None] = {}

    def launch(
        self, programs: int, tensors: Sequence[torch.Tensor], integers: Sequence[int], constants: tuple[Any, ...]
    ) -> None:
        """Launch on the current stream of the first tensor's device. ``programs`` may be 0: nothing happens."""
        if programs == 0:
            return
        first = tensors[0]
        index = first.get_device()  # -1: the CPU
        if index >= 0 and index != current_device():
            with torch.cuda.device(index):
                self.launch(programs, tensors, integers, constants)
            return
        addresses = [*map(_address, tensors)]
        # A binary was made for aligned pointers and 32-bit integers.
        fits = reduce(or_, addresses) % ALIGNED_BYTES == 0 and max(integers) <= _INT32_MAX >= programs
        key = (index, first.dtype, constants)
        launch = self._ready.get(key)
        if launch is not None and fits:
            launch(programs, [*addresses, *integers])
        else:
            self._launch_first(programs, tensors, integers, constants, key, [*addresses, *integers] if fits else None)

    def _launch_first(
        self,
        programs: int,
        tensors: Sequence[torch.Tensor],
        integers: Sequence[int],
        constants: tuple[Any, ...],
        key: tuple[int, torch.dtype, tuple[Any, ...]],
        values: Sequence[int] | None,
    ) -> None:
        """A launch whose binary is not known, or (``values`` None) that no binary of ours was made for."""
        if programs > _INT32_MAX:
            raise OverflowError(f"{self._function.__name__}: {programs} programs; cut the rows in parts")
        index, dtype, _ = key
        kernels = self._kernels
        if kernels is None and index >= 0:
            kernels = direct_kernels(index)

        def slowly() -> Any:
            return self._function[(programs,)](*tensors, *integers, *constants, num_warps=self._num_warps)

        if kernels is None or values is None:  # the interpreter, or Triton's way
            slowly()
            return
        variant = (self, dtype, constants)
        kernels.launch(variant, programs, values, constants, slowly)
        self._ready[key] = kernels.found(variant)
