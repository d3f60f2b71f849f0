"""The few functions of libcublasLt that `products` needs, by ctypes. Names and numbers are those of cublasLt.h.

torch has the library loaded already; asking for it by its version finds the same one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

from tpoverlap.errors import BackendUnavailableError, TpOverlapError

DATA_TYPES: Final = {
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
"""cudaDataType."""
TRANSPOSE_A: Final = 3
EPILOGUE: Final = 7
BIAS_POINTER: Final = 8
A_SCALE_POINTER: Final = 17
B_SCALE_POINTER: Final = 18
FAST_ACCUMULATION: Final = 25
"""Attributes of a product: cublasLtMatmulDescAttributes_t."""
WITH_BIAS: Final = 4
"""cublasLtEpilogue_t."""
ALGORITHM_BYTES: Final = 64
WORKSPACE_BYTES: Final = 32 << 20
"""What NVIDIA recommends for Hopper; earlier GPUs ask for less."""

_COMPUTE_FLOAT32, _FLOAT32 = 68, 0
_OPERATION_TRANSPOSE = 1
_LAYOUT_ROWS, _LAYOUT_COLUMNS = 2, 3
_MOST_WORKSPACE, _REDUCTION_SCHEMES, _FIRST_ALIGNMENT = 1, 3, 5
_REDUCE_IN_COMPUTE_TYPE = 2
_STATUS = {
    1: "not initialised",
    3: "allocation failed",
    7: "invalid value",
    13: "execution failed",
    15: "not supported",
}

_Address, _Size, _Int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * (ALGORITHM_BYTES // 8)),
        ("workspace_bytes", _Size),
        ("state", _Int),
        ("waves", ctypes.c_float),
        ("reserved", _Int * 4),
    )


class Library(Protocol):
    """What `products` asks for. Matrices are column-major, as everywhere in cuBLAS; handles and pointers are ints."""

    def new_product(self) -> int:
        """Of float32 sums."""
        ...

    def set_number(self, product: int, attribute: int, value: int, size_bytes: int) -> None:
        """An attribute of a product."""
        ...

    def new_layout(self, dtype: torch.dtype, rows: int, columns: int, leading: int) -> int: ...

    def set_columns(self, layout: int, columns: int) -> None: ...

    def algorithm(self, product: int, a: int, b: int, c: int, d: int, alignment_bytes: int) -> bytes | None:
        """The library's first choice for these layouts, with sums in float32 throughout; None: it has none."""
        ...

    def multiply(self, *arguments: int) -> int:
        """Call cublasLtMatmul, whose first argument is the handle; its status."""
        ...

    def free_layout(self, layout: int) -> None: ...

    def free_product(self, product: int) -> None: ...

    def native(self) -> NativeLibrary:
        """For who calls it without Python."""
        ...


class NativeLibrary(NamedTuple):
    """The handle, and the addresses of cublasLtMatmulDescSetAttribute and cublasLtMatmul."""

    handle: int
    attribute: int
    multiply: int


class CublasLt:
    """The library for one device, which must be the current one when this is made and used.

    Raises:
        BackendUnavailableError: there is no such library, or it refuses to start.
    """

    def __init__(self) -> None:
        version = torch.version.cuda
        if version is None:
            raise BackendUnavailableError("this torch was built without CUDA")
        name = f"libcublasLt.so.{version.split('.')[0]}"
        try:
            self._library = ctypes.CDLL(name)
            self._multiply = _function(self._library, "cublasLtMatmul", *[_Address] * 14, _Size, _Address)
            self._set = _function(self._library, "cublasLtMatmulDescSetAttribute", _Address, _Int, _Address, _Size)
            self._set_layout = _function(
                self._library, "cublasLtMatrixLayoutSetAttribute", _Address, _Int, _Address, _Size
            )
        except (OSError, AttributeError) as error:
            raise BackendUnavailableError(f"{name}: {error}") from None
        self._handle = self._made("cublasLtCreate", [])
        self._number = (ctypes.c_uint64 * 1)()  # callers hold a lock
        self._number_at = ctypes.addressof(self._number)

    def new_product(self) -> int:
        return self._made("cublasLtMatmulDescCreate", [_Int, _Int], _COMPUTE_FLOAT32, _FLOAT32)

    def set_number(self, product: int, attribute: int, value: int, size_bytes: int) -> None:
        self._number[0] = value  # little-endian: its first bytes are the smaller number
        _check(self._set(product, attribute, self._number_at, size_bytes), "cublasLtMatmulDescSetAttribute")

    def new_layout(self, dtype: torch.dtype, rows: int, columns: int, leading: int) -> int:
        kinds = [_Int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64]
        return self._made("cublasLtMatrixLayoutCreate", kinds, DATA_TYPES[dtype], rows, columns, leading)

    def set_columns(self, layout: int, columns: int) -> None:
        self._number[0] = columns
        status = self._set_layout(layout, _LAYOUT_COLUMNS, self._number_at, 8)
        _check(status, "cublasLtMatrixLayoutSetAttribute")

    def algorithm(self, product: int, a: int, b: int, c: int, d: int, alignment_bytes: int) -> bytes | None:
        preference = self._made("cublasLtMatmulPreferenceCreate", [])
        self._prefer(preference, _MOST_WORKSPACE, WORKSPACE_BYTES, 8)
        # By default parts of a sum over K may be rounded to the result's dtype before they are added.
        self._prefer(preference, _REDUCTION_SCHEMES, _REDUCE_IN_COMPUTE_TYPE, 4)
        for operand in range(4):  # 256 bytes unless one says so, and rows start anywhere
            self._prefer(preference, _FIRST_ALIGNMENT + operand, alignment_bytes, 4)
        found, count = _Heuristic(), ctypes.c_int(0)
        ask = _function(self._library, "cublasLtMatmulAlgoGetHeuristic", *[_Address] * 7, _Int, _Address, _Address)
        at = ctypes.addressof
        status = ask(self._handle, product, a, b, c, d, preference, 1, at(found), at(count))
        _function(self._library, "cublasLtMatmulPreferenceDestroy", _Address)(preference)
        if status or count.value == 0 or found.state:
            return None
        return bytes(found.algorithm)

    def _prefer(self, preference: int, attribute: int, value: int, size_bytes: int) -> None:
        self._number[0] = value
        name = "cublasLtMatmulPreferenceSetAttribute"
        prefer = _function(self._library, name, _Address, _Int, _Address, _Size)
        _check(prefer(preference, attribute, self._number_at, size_bytes), name)

    def multiply(self, *arguments: int) -> int:
        status: int = self._multiply(self._handle, *arguments)
        return status

    def free_layout(self, layout: int) -> None:
        _function(self._library, "cublasLtMatrixLayoutDestroy", _Address)(layout)

    def free_product(self, product: int) -> None:
        _function(self._library, "cublasLtMatmulDescDestroy", _Address)(product)

    def native(self) -> NativeLibrary:
        functions: tuple[Any, Any] = self._set, self._multiply
        attribute, multiply = (ctypes.cast(one, _Address).value for one in functions)
        assert attribute is not None and multiply is not None, "both were found"
        return NativeLibrary(self._handle, attribute, multiply)

    def _made(self, name: str, kinds: Sequence[type], *arguments: int) -> int:
        made = ctypes.c_void_p()
        _check(_function(self._library, name, _Address, *kinds)(ctypes.addressof(made), *arguments), name)
        assert made.value, f"{name} made nothing and reported no error"
        return made.value


def _function(library: ctypes.CDLL, name: str, *kinds: type) -> Callable[..., int]:
    function: Any = getattr(library, name)
    function.argtypes, function.restype = kinds, _Int
    found: Callable[..., int] = function
    return found


def _check(status: int, name: str) -> None:
    if status:
        raise BackendUnavailableError(f"{name} failed with status {status_text(status)}")


def product_failed(what: str, status: int) -> TpOverlapError:
    """The error of a call that fails although the library had an algorithm. ``what``: the call."""
    return TpOverlapError(
        f"{what} failed with status {status_text(status)}; this is a defect of tpoverlap: please report it with your "
        "versions"
    )


def status_text(status: int) -> str:
    """``cublasStatus_t`` in words."""
    return f"{status} ({_STATUS[status]})" if status in _STATUS else str(status)
