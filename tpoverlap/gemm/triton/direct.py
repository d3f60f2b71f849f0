"""Launches of small kernels whose arguments all change: one look-up for the binary, one call of the driver.

Triton's own launch looks at every argument to find the binary that fits, and then asks for hooks, metadata and the
current device: that takes longer than a small kernel. Here the caller names all that a binary depends on, and a launch
writes the arguments, pointers and 32-bit numbers, into a block that is kept. (`prepared` is for kernels with tensor
maps, whose arguments mostly stay.)
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, Final

import torch

from tpoverlap.gemm.triton.compiled import Kernel, packed_layout
from tpoverlap.gemm.triton.kernel_driver import CudaKernelDriver, KernelDriver
from tpoverlap.gemm.triton.parameters import LayoutError, ParameterLayout

logger = logging.getLogger("tpoverlap")
Number = int | float
Launch = Callable[[int, Sequence[Number]], None]
"""(programs, the arguments but for constants) on the current stream."""
_CONFIG: Final = "<I28sQ24s"
"""`kernel_driver.LaunchConfig` as a launch writes it: programs, `_SIZES`, stream, `_REST`."""
_SIZES: Final = struct.Struct("<6I4x")
"""The grid's other two sizes, the block's three, shared bytes."""
_REST: Final = bytes(24)
"""No attributes."""
_PARAMETERS_AT: Final = struct.calcsize(_CONFIG)
"""Behind the launch's configuration, in one block."""

current_device: Final[Callable[[], int]] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Index of the calling thread's CUDA device, which has been used before: ``torch.cuda``'s asks more first."""


class DirectKernels:
    """Binaries by what they depend on, for one device; autograd's threads may launch at the same time as others.

    Args:
        driver: of the device.
    """

    def __init__(self, driver: KernelDriver) -> None:
        self._driver = driver
        self._found: dict[Hashable, Launch] = {}

    def launch(
        self,
        key: Hashable,
        programs: int,
        values: Sequence[Number],
        constants: Sequence[Any],
        launch_slowly: Callable[[], Any],
    ) -> None:
        """Launch on the current stream of the device, which must be the current one.

        Args:
            key: names the kernel and all that its binary depends on.
            programs: at least one.
            values: the arguments but for constants: addresses, and numbers that the kernel leaves unspecialised.
            constants: the others, for Triton's launch.
            launch_slowly: the same launch by Triton, which compiles; returns the binary.
        """
        found = self._found.get(key)
        if found is not None:
            found(programs, values)
            return
        binary = launch_slowly()
        self._found[key] = self._direct(binary) or (
            lambda programs, values: binary[(programs, 1, 1)](*values, *constants)
        )

    def found(self, key: Hashable) -> Launch | None:
        """What `launch` calls for ``key``, for who wants to call it without one; None before the first launch."""
        return self._found.get(key)

    def _direct(self, binary: Any) -> Launch | None:
        try:
            names = tuple(binary.src.signature)
            layout = packed_layout(Kernel(str(getattr(binary, "name", "")), names), binary)
            if any(not code for _, code in layout.places.values()):
                raise LayoutError("it takes tensor maps")
        except (LayoutError, AttributeError) as error:
            logger.warning("small kernels are launched by Triton, which takes longer: %s", error)
            return None
        return DirectLaunch(self._driver, binary, layout)


class DirectLaunch:
    """One binary."""

    def __init__(self, driver: KernelDriver, binary: Any, layout: ParameterLayout) -> None:
        self._driver, self._binary = driver, binary
        self._start, self._function, self._current_stream = driver.start, binary.function, driver.current_stream
        self._fixed = _SIZES.pack(1, 1, 32 * binary.metadata.num_warps, 1, 1, binary.metadata.shared)
        self._pack = struct.Struct(_CONFIG + _format(layout)).pack_into
        self._block = bytearray(_PARAMETERS_AT + layout.size_bytes)
        self._config_at = ctypes.addressof((ctypes.c_char * len(self._block)).from_buffer(self._block))
        first = self._config_at + _PARAMETERS_AT
        self._parameters = (ctypes.c_uint64 * len(layout.offsets))(*[first + offset for offset in layout.offsets])
        self._parameters_at = ctypes.addressof(self._parameters)
        self._lock = Lock()  # the driver's call lets other threads run, and the block is not theirs until it is back

    def __call__(self, programs: int, values: Sequence[Number]) -> None:
        with self._lock:
            self._pack(self._block, 0, programs, self._fixed, self._current_stream(), _REST, *values)
            status = self._start(self._config_at, self._function, self._parameters_at, 0)
            if status:
                self._driver.start_again(status, self._config_at, self._function, self._parameters_at)


def _format(layout: ParameterLayout) -> str:
    """Of all arguments in a row; what follows them (scratch that no kernel of ours asks for) stays zero."""
    text, end = "", 0
    for offset, code in layout.places.values():
        text += f"{offset - end}x{code}"
        end = offset + struct.calcsize(code)
    return text


@lru_cache(maxsize=16)
def direct_kernels(index: int) -> DirectKernels:
    """Those of a CUDA device."""
    return DirectKernels(CudaKernelDriver(torch.device("cuda", index)))
