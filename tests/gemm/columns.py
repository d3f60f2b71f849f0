"""A twin of cublasLt on the CPU: it reads the operands where the descriptors say, column by column, and multiplies."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch

from tpoverlap.gemm.cublaslt.library import (
    A_SCALE_POINTER,
    ALGORITHM_BYTES,
    B_SCALE_POINTER,
    BIAS_POINTER,
    EPILOGUE,
    FAST_ACCUMULATION,
    TRANSPOSE_A,
    WITH_BIAS,
    WORKSPACE_BYTES,
    NativeLibrary,
)

_HANDLE = 77


@dataclass
class Layout:
    """A column-major matrix."""

    dtype: torch.dtype
    rows: int
    columns: int
    leading: int

    def at(self, address: int) -> torch.Tensor:
        """What lies there, as [rows, columns]; writing to it writes there."""
        size_bytes = ((self.columns - 1) * self.leading + self.rows) * self.dtype.itemsize
        memory = (ctypes.c_uint8 * size_bytes).from_address(address)
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(self.dtype)
        return flat.as_strided((self.rows, self.columns), (1, self.leading))


@dataclass
class Columns:
    """`tpoverlap.gemm.cublaslt.library.Library`.

    Attributes:
        has_algorithms: False: it never knows one.
        asked: columns of every product that an algorithm was asked for.
        calls: stream and workspace of every product.
    """

    has_algorithms: bool = True
    status: int = 0
    asked: list[int] = field(default_factory=list)
    calls: list[tuple[int, int]] = field(default_factory=list)
    products: list[dict[int, int]] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    freed: set[int] = field(default_factory=set)
    callbacks: list[object] = field(default_factory=list)

    def new_product(self) -> int:
        self.products.append({})
        return len(self.products) - 1

    def set_number(self, product: int, attribute: int, value: int, size_bytes: int) -> None:
        wide = attribute in (BIAS_POINTER, A_SCALE_POINTER, B_SCALE_POINTER)
        assert size_bytes == (8 if wide else 1 if attribute == FAST_ACCUMULATION else 4)
        self.products[product][attribute] = value

    def new_layout(self, dtype: torch.dtype, rows: int, columns: int, leading: int) -> int:
        assert leading >= rows, "columns overlap"
        self.layouts.append(Layout(dtype, rows, columns, leading))
        return len(self.layouts) - 1

    def set_columns(self, layout: int, columns: int) -> None:
        self.layouts[layout].columns = columns

    def algorithm(self, product: int, a: int, b: int, c: int, d: int, alignment_bytes: int) -> bytes | None:
        assert self.layouts[b].columns == self.layouts[c].columns == self.layouts[d].columns
        self.asked.append(self.layouts[d].columns)
        return bytes([self.layouts[d].columns % 251]) * ALGORITHM_BYTES if self.has_algorithms else None

    def free_layout(self, layout: int) -> None:
        assert layout not in self.freed, "twice"
        self.freed.add(layout)

    def free_product(self, product: int) -> None:
        assert ~product not in self.freed, "twice"
        self.freed.add(~product)

    def native(self) -> NativeLibrary:
        def attribute(product: int, which: int, value: int, size_bytes: int) -> int:
            assert size_bytes == 8
            self.products[product][which] = ctypes.c_uint64.from_address(value).value
            return self.status

        def multiply(handle: int, *arguments: int) -> int:
            assert handle == _HANDLE
            return self.multiply(*arguments)

        number = ctypes.c_uint64
        kinds = [(attribute, [number, ctypes.c_int, number, number]), (multiply, [number] * 16)]
        self.callbacks = [ctypes.CFUNCTYPE(ctypes.c_int, *kind)(function) for function, kind in kinds]
        return NativeLibrary(_HANDLE, *[ctypes.cast(one, ctypes.c_void_p).value or 0 for one in self.callbacks])

    def multiply(self, *arguments: int) -> int:
        product, alpha, right, a, left, b, beta, addend, c, out, d, algorithm, workspace, size_bytes, stream = arguments
        self.calls.append((stream, workspace))
        columns = ctypes.string_at(algorithm, ALGORITHM_BYTES)
        assert len(set(columns)) == 1 and any(columns[0] == asked % 251 for asked in self.asked)
        assert size_bytes == WORKSPACE_BYTES and workspace % 16 == 0
        attributes = self.products[product]
        one = self.layouts[a].at(right).float()
        if attributes.get(TRANSPOSE_A):
            one = one.t()
        result = one @ self.layouts[b].at(left).float()
        if A_SCALE_POINTER in attributes:
            result *= _number(attributes[A_SCALE_POINTER]) * _number(attributes[B_SCALE_POINTER])
        result *= _number(alpha)
        if _number(beta):
            assert addend != out or c == d, "in place under two layouts"
            result += _number(beta) * self.layouts[c].at(addend).float()
        target = self.layouts[d].at(out)
        if attributes.get(EPILOGUE) == WITH_BIAS:
            result += Layout(target.dtype, target.shape[0], 1, target.shape[0]).at(attributes[BIAS_POINTER]).float()
        target.copy_(result)
        return self.status


def _number(address: int) -> float:
    return ctypes.c_float.from_address(address).value
