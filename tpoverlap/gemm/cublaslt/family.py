"""A `Family`: products that differ in addresses and in their number of rows only, and one of them with fixed rows.

It keeps the library's descriptors, and an algorithm for each step of `_bucket` rows, so that a new T is no new search.

cuBLAS thinks in columns: ``out = left @ right`` of rows is ``out' = right' @ left'`` of columns, so the right operand
is its A, the left one its B, and the number of rows is the number of columns of B, C and D.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Final

import torch

from tpoverlap.gemm.cublaslt.library import (
    A_SCALE_POINTER,
    B_SCALE_POINTER,
    BIAS_POINTER,
    EPILOGUE,
    FAST_ACCUMULATION,
    TRANSPOSE_A,
    WITH_BIAS,
    WORKSPACE_BYTES,
    Library,
    product_failed,
)
from tpoverlap.native import Cell, Recording

ALIGNMENT_BYTES: Final = 16
"""Of every operand's first element and of its rows: what the tensor memory accelerator asks for."""


class Family:
    """Products that differ in addresses and rows only."""

    __slots__ = (
        "_a", "_algorithms", "_b", "_bias", "_c", "_d", "_library", "_moving", "_options", "_product", "_rows",
        "_scales",
    )  # fmt: skip

    def __init__(
        self,
        library: Library,
        left: torch.Tensor,
        right: torch.Tensor,
        out: torch.Tensor,
        addend: torch.Tensor | None,
        *,
        has_bias: bool,
        fast: bool,
    ) -> None:
        (inner, features), rows = right.shape, left.shape[0]
        self._library = library
        self._options = [
            option
            for option, wanted in (
                ((TRANSPOSE_A, 1, 4), right.stride(0) == 1 and inner > 1),
                ((EPILOGUE, WITH_BIAS, 4), has_bias),
                ((FAST_ACCUMULATION, 1, 1), fast),
            )
            if wanted
        ]
        self._product = self._new_product()
        if right.stride(0) == 1 and inner > 1:
            self._a = library.new_layout(right.dtype, inner, features, right.stride(1))
        else:
            self._a = library.new_layout(right.dtype, features, inner, right.stride(0))
        in_place = addend is None or addend.data_ptr() == out.data_ptr()
        # dtype, rows and pitch of what has as many columns as the left operand has rows
        self._moving = [(left.dtype, inner, left.stride(0)), (out.dtype, features, out.stride(0))]
        if addend is not None and not in_place:
            self._moving.append((addend.dtype, features, addend.stride(0)))
        self._b, self._d, self._c = self._new_layouts(rows)
        self._rows = rows
        self._bias = 0
        self._scales = (0, 0)
        self._algorithms: dict[int, Any] = {}

    def run(
        self,
        rows: int,
        addresses: tuple[int, int, int, int],
        factors: tuple[int, int],
        workspace: int,
        stream: int,
        bias: int,
        scales: tuple[int, int] | None,
    ) -> bool:
        """Launch; False: the library has nothing for this. Under the caller's lock.

        Args:
            rows: of the left operand.
            addresses: right, left, addend, out.
            factors: addresses of alpha and beta.
            workspace: address of `WORKSPACE_BYTES`.
            bias: address of the bias, if it has one.
            scales: addresses of those of the right and of the left operand.
        """
        library = self._library
        if bias != self._bias:
            library.set_number(self._product, BIAS_POINTER, bias, 8)
            self._bias = bias
        if scales is not None and scales != self._scales:
            library.set_number(self._product, A_SCALE_POINTER, scales[0], 8)
            library.set_number(self._product, B_SCALE_POINTER, scales[1], 8)
            self._scales = scales
        found = self._algorithm(rows)
        if found is None:
            return False
        if rows != self._rows:
            self._set_rows(rows)
        right, left, addend, out = addresses
        alpha, beta = factors
        status = library.multiply(
            self._product, alpha, right, self._a, left, self._b, beta, addend, self._c, out, self._d,
            ctypes.addressof(found), workspace, WORKSPACE_BYTES, stream,
        )  # fmt: skip
        if status:
            raise product_failed(f"cublasLtMatmul of {rows} rows", status)
        return True

    def fixed(self, rows: int, *, points: bool) -> FixedProduct | None:
        """The product of ``rows`` rows, for a `tpoverlap.native.Tape`; None: the library has nothing for this.

        Args:
            points: its descriptor says where a bias or scales lie, so it gets one of its own.
        """
        algorithm = self._algorithm(rows)
        if algorithm is None:
            return None
        product = self._new_product() if points else self._product
        return FixedProduct(self._library, product, points, self._a, self._new_layouts(rows), algorithm)

    def _new_product(self) -> int:
        product = self._library.new_product()
        for option in self._options:
            self._library.set_number(product, *option)
        return product

    def _new_layouts(self, rows: int) -> tuple[int, int, int]:
        """Of the left operand, the result and the addend, which may have the result's."""
        made = [self._library.new_layout(dtype, inner, rows, pitch) for dtype, inner, pitch in self._moving]
        return made[0], made[1], made[-1]

    def _algorithm(self, rows: int) -> Any:
        """Where the library's choice for this many rows lies; None: it has none."""
        bucket = _bucket(rows)
        if bucket not in self._algorithms:
            self._set_rows(bucket)
            found = self._library.algorithm(self._product, self._a, self._b, self._c, self._d, ALIGNMENT_BYTES)
            self._algorithms[bucket] = found if found is None else ctypes.create_string_buffer(found, len(found))
        return self._algorithms[bucket]

    def _set_rows(self, rows: int) -> None:
        library = self._library
        library.set_columns(self._b, rows)
        library.set_columns(self._d, rows)
        if self._c != self._d:
            library.set_columns(self._c, rows)
        self._rows = rows


class FixedProduct:
    """A product of a `Family` whose rows stay the same, with descriptors of its own for what depends on them."""

    __slots__ = ("_a", "_algorithm", "_cells", "_layouts", "_library", "_owns_product", "_product")

    def __init__(
        self,
        library: Library,
        product: int,
        owns_product: bool,
        a: int,
        layouts: tuple[int, int, int],
        algorithm: Any,
    ) -> None:
        self._library, self._product, self._owns_product, self._a = library, product, owns_product, a
        self._layouts, self._algorithm = layouts, algorithm
        self._cells = {attribute: Cell() for attribute in (BIAS_POINTER, A_SCALE_POINTER, B_SCALE_POINTER)}

    def record(
        self,
        recording: Recording,
        operands: tuple[int, int, int, int],
        factors: tuple[int, int],
        workspace: int,
        stream: int,
        pointers: Mapping[int, int],
    ) -> None:
        """Write down its launch. All but the factors, the workspace and the stream may be registers.

        Args:
            operands: addresses of right, left, addend, out.
            factors: addresses of alpha and beta.
            workspace: address of `WORKSPACE_BYTES`.
            pointers: attribute -> address of the bias, of the right and of the left operand's scale, if it has them.
        """
        right, left, addend, out = operands
        b, d, c = self._layouts
        for attribute, address in pointers.items():
            assert self._owns_product, "others' launches would see it"
            recording.attribute(self._product, attribute, self._cells[attribute], address)
        arguments = (
            self._product, factors[0], right, self._a, left, b, factors[1], addend, c, out, d,
            ctypes.addressof(self._algorithm), workspace, WORKSPACE_BYTES, stream,
        )  # fmt: skip
        recording.multiply(arguments, self)

    def __del__(self) -> None:  # a tape that nobody plays any more
        for layout in set(self._layouts):
            self._library.free_layout(layout)
        if self._owns_product:
            self._library.free_product(self._product)


def _bucket(rows: int) -> int:
    """The number of rows whose algorithm ``rows`` rows take: the next multiple of a step that grows with them."""
    step = 8 if rows <= 64 else 16 if rows <= 128 else 64 if rows <= 512 else 128
    return -(-rows // step) * step
