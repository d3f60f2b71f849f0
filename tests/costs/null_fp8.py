"""The FP8 kernels' launches on a GPU that does nothing: Triton's functions, and the operations that launch them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

from tests.costs.null_kernels import NullKernelDriver, ptx_of
from tpoverlap.gemm.fp8.kernels.launch import KernelOperations
from tpoverlap.gemm.triton.direct import DirectKernels

CONSTANTS: Final = {"tiles.amax_tiles": 3, "tiles.quantize_tiles": 8, "tiles.transpose_tiles": 3}


class NullFunction:
    """Triton's function of ``constants`` constants: its binary does nothing, and is launched by address."""

    def __init__(self, name: str, constants: int) -> None:
        self.name, self._constants = name, constants

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.binary(arguments[: len(arguments) - self._constants])

    def binary(self, arguments: tuple[Any, ...]) -> Any:
        """Of a launch with these arguments, constants left out."""
        types = {float: "fp32", int: "i32"}
        signature = {f"a{index}": types.get(type(one), "*fp16") for index, one in enumerate(arguments)}
        return SimpleNamespace(
            function=hash(self.name) & 0xFFFF,
            name=self.name,
            src=SimpleNamespace(signature=signature),
            metadata=SimpleNamespace(num_warps=4, shared=0, tensordesc_meta=None),
            asm={"ptx": ptx_of(self.name, list(signature.values()))},
        )


class NullFp8Kernels(KernelOperations):
    """On the CPU, with a driver that does nothing."""

    def __init__(self, driver: NullKernelDriver) -> None:
        self._interpreted, self._kernels, self._index, self._ready = False, DirectKernels(driver), 0, {}


def null_function(name: str) -> NullFunction:
    """In place of `tpoverlap.gemm.fp8.kernels.launch.load`."""
    return NullFunction(name, CONSTANTS[name])
