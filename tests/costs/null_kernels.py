"""A GPU whose kernels do nothing, at once: what is left of a launch is the host's own work, and its parameters."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tpoverlap.gemm.triton import compiled
from tpoverlap.gemm.triton.compiled import Kernel
from tpoverlap.gemm.triton.kernel_driver import KernelDriver, LaunchConfig
from tpoverlap.gemm.triton.prepared import Described

MAP = struct.Struct("<QIIIIIII92x")
"""address, rows, columns, row_bytes, box rows and columns, swizzle, data type."""
STREAM = 0x5EA


class NullKernelDriver(KernelDriver):
    """Counts its calls. `seen` is asked for each launch's (grid, parameters' addresses) if it is set."""

    def __init__(self, multiprocessors: int = 132, has_tma: bool = True) -> None:
        self.multiprocessors, self.has_tma = multiprocessors, has_tma
        self.starts = self.encodes = 0
        self.statuses: list[int] = []
        self.seen: Callable[[int, int], None] | None = None
        self.start = self._start
        self.current_stream = partial(int, STREAM)

    def _start(self, config: int, function: int, parameters: int, extra: int) -> int:
        self.starts += 1
        if self.seen is not None:
            self.seen(LaunchConfig.from_address(config).grid[0], parameters)
        return self.statuses.pop() if self.statuses else 0

    def encode(
        self,
        address: int,
        rows: int,
        columns: int,
        row_bytes: int,
        box: tuple[int, int],
        swizzle: int,
        data_type: int,
        itemsize: int,
    ) -> bytes:
        self.encodes += 1
        return MAP.pack(address, rows, columns, row_bytes, *box, swizzle, data_type)

    def start_again(self, status: int, config: int, function: int, parameters: int) -> None:
        assert status == 201, status
        assert self.start(config, function, parameters, 0) == 0


class NullBinary:
    """As Triton would return it for these arguments; its PTX declares what the real one does."""

    def __init__(self, kernel: Kernel, arguments: Sequence[Any], variant: tuple[Any, ...] = ()) -> None:
        self.function = hash((kernel.name, variant)) & 0xFFFFFFFF  # another variant is another function
        given = zip(kernel.arguments, arguments, strict=True)
        if kernel.name.startswith("trade_"):
            signature = dict.fromkeys(kernel.arguments, "i64")
        else:
            signature = {name: type_of(name, value) for name, value in given}
        self.src = SimpleNamespace(signature={**signature, "ROWS": "constexpr"})
        maps = [value for value in arguments if isinstance(value, Described)]
        self.metadata = SimpleNamespace(
            num_warps=8,
            shared=1000,
            tensordesc_meta=[
                {"swizzle": 3, "elem_size": one.tensor.element_size(), "block_size": list(one.block_shape)}
                for one in maps
            ],
        )
        self.asm = {"ptx": ptx_of(kernel.name, list(signature.values()))}


def type_of(name: str, value: Any) -> str:
    """Triton's name for an argument's type."""
    if isinstance(value, Described):
        return "tensordesc<fp16[16,32]>"
    if isinstance(value, torch.Tensor):
        return "*fp16"
    return "i64" if name in ("received", "flags", "limit", "error") else "i32"


def ptx_of(name: str, types: Sequence[str]) -> str:
    """The entry of a kernel with these parameters and two pointers to scratch."""
    declared: list[str] = []
    for kind in types:
        if kind.startswith("tensordesc"):
            declared += [".align 64 .b8 {}[128]", ".u32 {}", ".u32 {}", ".u64 {}", ".u64 {}"]
        else:
            known = {"*": ".u64 .ptr .global .align 1 {}", "i": f".u{kind[1:]} {{}}", "f": f".f{kind[2:]} {{}}"}
            declared.append(known[kind[0]])
    declared += [".u64 .ptr .global .align 1 {}"] * 2
    lines = [f"\t.param {text.format(f'{name}_param_{number}')}" for number, text in enumerate(declared)]
    return f".visible .entry {name}(\n" + ",\n".join(lines) + "\n)\n{ ret; }"


@contextmanager
def no_compiler() -> Iterator[list[tuple[str, Sequence[Any]]]]:
    """Within the block binaries are `NullBinary`; the list gets (kernel, arguments) of each one that is made."""
    made: list[tuple[str, Sequence[Any]]] = []

    def compile_nothing(kernel: Kernel, programs: int, arguments: Sequence[Any], *rest: Any) -> NullBinary:
        made.append((kernel.name, arguments))
        return NullBinary(kernel, arguments, rest)

    with mock.patch.object(compiled, "launch_slowly", compile_nothing):
        yield made


def parameter(parameters: int, number: int, size: int) -> bytes:
    """Bytes of one parameter of a launch."""
    address = ctypes.c_uint64.from_address(parameters + 8 * number).value
    return ctypes.string_at(address, size)
