"""Launching the FP8 kernels: the same operations as `tpoverlap.gemm.fp8.plain.PlainOperations`, on a GPU.

A variant names all that a binary depends on (constants, dtype, which pointers are aligned; sizes are never
specialised), so a launch is one look-up (`tpoverlap.gemm.triton.direct`).
"""

from __future__ import annotations

import importlib
from collections.abc import Hashable, Sequence
from functools import reduce
from operator import or_
from typing import Any, Final

import torch

from tpoverlap.errors import ActiveShapeError, BackendUnavailableError
from tpoverlap.gemm.fp8.plain import ALIGNMENT, MOST_MAXIMA, SCALE_BYTES
from tpoverlap.gemm.fp8.scale_rule import ScaleRule
from tpoverlap.gemm.triton import kernels_missing
from tpoverlap.gemm.triton.direct import DirectKernels, Launch, current_device
from tpoverlap.gemm.triton.kernel_driver import CudaKernelDriver

_VECTOR: Final = 16
_TILE_ROWS, _TILE_COLUMNS = 128, 128
_AMAX_ROWS, _AMAX_COLUMNS = 8, 1024
_TILE_WARPS: Final = 8
_PROGRAMS: Final = 1056
_ROW_BLOCK: Final = 16384
"""Elements of a row that stay in registers between its magnitude and its bytes; longer rows are read twice."""
_UNPACK_TILE: Final = (8, 256)
_MOST: Final = 2**31
_BYTES, _WORDS = torch.uint8, torch.int32
_SEEN_AS: Final[dict[str, tuple[torch.dtype | None, ...]]] = {
    "tiles.quantize_tiles": (None, None, None, _BYTES, _WORDS),
    "tiles.transpose_tiles": (_BYTES, _WORDS),
    "tiles.dequantize_tiles": (_BYTES, None, None),
    "rows.quantize_rows": (None, None, _BYTES),  # packed: words already
}
"""What kernels take float8 tensors for: a launch by address needs no view."""
_Source = tuple[torch.Tensor, int, int, int, int, int]
"""A tensor, its rows, columns and pitch, the unit that these are multiples of (16 or 1), and its address."""


class KernelOperations:
    """Binaries of one device. On the CPU, Triton's interpreter, for tests.

    Raises:
        BackendUnavailableError: the kernels do not run there, with what is missing.
    """

    shared_parts = MOST_MAXIMA

    def __init__(self, device: torch.device) -> None:
        missing = kernels_missing(device)
        if missing is not None:
            raise BackendUnavailableError(f"FP8 on {device} needs Triton kernels: {missing}, or run without fp8")
        self._interpreted = device.type == "cpu"
        self._kernels: DirectKernels | None = None
        self._ready: dict[Hashable, Launch | None] = {}
        if not self._interpreted:
            self._index = torch.cuda.current_device() if device.index is None else device.index
            self._kernels = DirectKernels(CudaKernelDriver(torch.device("cuda", self._index)))

    def maxima(self, x: torch.Tensor, *, shared: bool = False) -> torch.Tensor:
        """As the twin's; n is the number of programs, and those without a tile find 0."""
        return self._maxima(_source(x), shared)

    def quantize_by_maxima(
        self, x: torch.Tensor, maxima: torch.Tensor, rule: ScaleRule, transposes: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """As the twin's, in one launch."""
        scale = maxima.new_empty(1, 1)
        return *self._quantize(_source(x), maxima, scale, rule, transposes), scale

    def quantize_local(
        self, x: torch.Tensor, rule: ScaleRule, transposes: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """As the twin's, in two launches."""
        source = _source(x)
        maxima = self._maxima(source, False)
        scale = maxima.new_empty(1, 1)
        return *self._quantize(source, maxima, scale, rule, transposes), scale

    def quantize(
        self, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, transposes: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the twin's, in one launch."""
        return self._quantize(_source(x), None, scale, ScaleRule(dtype), transposes)

    def _maxima(self, source: _Source, shared: bool) -> torch.Tensor:
        x, num_rows, width, pitch, unit, address = source
        if pitch == width and num_rows * width % _AMAX_COLUMNS == 0:  # contiguous: as rows of one tile's width
            num_rows, width, pitch = num_rows * width // _AMAX_COLUMNS, _AMAX_COLUMNS, _AMAX_COLUMNS
            if address % _VECTOR == 0:
                unit = _VECTOR
        tiles = -(-num_rows // _AMAX_ROWS) * -(-width // _AMAX_COLUMNS)
        if tiles == 0:
            return x.new_zeros(MOST_MAXIMA if shared else 1, 1, dtype=torch.float32)
        programs = tiles if tiles < MOST_MAXIMA and not shared else MOST_MAXIMA
        found = x.new_empty(programs, 1, dtype=torch.float32)
        found_at = found.data_ptr()
        numbers = (num_rows, width // unit, pitch // unit)
        kind = ("amax", unit, x.dtype)
        launch = self._ready.get(kind)
        if launch is not None and (address | found_at) % _VECTOR == 0 and self._index == current_device():
            launch(programs, (address, found_at, *numbers))
            return found
        constants = (unit, _AMAX_ROWS, _AMAX_COLUMNS)
        self._launch("tiles.amax_tiles", programs, (x, found), numbers, constants, _TILE_WARPS, kind)
        return found

    def _quantize(
        self, source: _Source, maxima: torch.Tensor | None, scale: torch.Tensor, rule: ScaleRule, transposes: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, num_rows, width, pitch, unit, address = source
        dtype, padded_units = rule.dtype, -(-num_rows // ALIGNMENT)
        data = x.new_empty(num_rows, width, dtype=dtype)
        transposed = x.new_empty(width, padded_units * ALIGNMENT, dtype=dtype) if transposes else None
        writes = transposed is not None and num_rows > 0
        # One program at least: it writes the scale of a tensor without rows.
        tiles = -(-num_rows // _TILE_ROWS) * -(-width // _TILE_COLUMNS)
        programs = _PROGRAMS if tiles > _PROGRAMS else tiles or 1
        scale_at, data_at = scale.data_ptr(), data.data_ptr()
        maxima_at, count = (scale_at, 0) if maxima is None else (maxima.data_ptr(), maxima.numel())
        transposed_at = transposed.data_ptr() if transposed is not None and writes else scale_at
        numbers = (count, num_rows, width // unit, pitch // unit, padded_units, rule.factor, rule.epsilon)
        kind = ("quantize", unit, x.dtype, dtype, rule.power_of_2, maxima is None, writes)
        launch = self._ready.get(kind)
        if (
            launch is not None
            and (address | maxima_at | scale_at | data_at | transposed_at) % _VECTOR == 0
            and self._index == current_device()
        ):
            launch(programs, (address, maxima_at, scale_at, data_at, transposed_at, *numbers))
            return data, transposed
        self._launch(
            "tiles.quantize_tiles",
            programs,
            (
                x,
                scale if maxima is None else maxima,
                scale,
                data,
                transposed if transposed is not None and writes else scale,
            ),
            numbers,
            (
                unit,
                _TILE_ROWS,
                _TILE_COLUMNS,
                0 if maxima is None else MOST_MAXIMA,
                rule.is_e5m2,
                rule.power_of_2,
                writes,
                self._interpreted,
            ),
            _TILE_WARPS,
            kind,
        )
        return data, transposed

    def transpose(self, data: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As the twin's, in one launch."""
        data, num_rows, width, pitch, unit, address = _source(data)
        padded_units = -(-num_rows // ALIGNMENT)
        made = data.new_empty(width, padded_units * ALIGNMENT, dtype=dtype)
        tiles = -(-num_rows // _TILE_ROWS) * -(-width // _TILE_COLUMNS)
        if tiles == 0:
            return made
        programs = tiles if tiles < _PROGRAMS else _PROGRAMS
        made_at = made.data_ptr()
        numbers = (num_rows, width // unit, pitch // unit, padded_units)
        kind = ("transpose", unit, data.dtype)
        launch = self._ready.get(kind)
        if launch is not None and (address | made_at) % _VECTOR == 0 and self._index == current_device():
            launch(programs, (address, made_at, *numbers))
            return made
        constants = (unit, _TILE_ROWS, _TILE_COLUMNS)
        self._launch("tiles.transpose_tiles", programs, (data, made), numbers, constants, _TILE_WARPS, kind)
        return made

    def quantize_rows(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """As the twin's, in one launch."""
        data = x.new_empty(x.shape, dtype=dtype)
        scale = x.new_empty(x.shape[0], 1, dtype=torch.float32)
        self._rows(x, dtype, scale, data, packed=False)
        return data, scale

    def pack_rows(self, x: torch.Tensor, dtype: torch.dtype, out: torch.Tensor) -> None:
        """As the twin's, in one launch. ``out`` starts on 4 bytes, as rows of N + 4 bytes do."""
        words = _words(out)
        self._rows(x, dtype, words, words, packed=True)

    def _rows(
        self, x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor, data: torch.Tensor, *, packed: bool
    ) -> None:
        x, num_rows, width, pitch, unit, _ = _source(x)
        if num_rows == 0:
            return
        columns = min(max(4, 1 << (width - 1).bit_length()), _ROW_BLOCK)
        rows = max(1, 4096 // columns)
        rule = ScaleRule(dtype)
        self._launch(
            "rows.quantize_rows",
            -(-num_rows // rows),
            (x, scale, data),
            (num_rows, width // unit, pitch // unit, data.stride(0), rule.factor),
            (unit, rows, columns, width <= columns, rule.is_e5m2, packed, self._interpreted),
            min(16, max(4, rows * columns // 1024)),
        )

    def unpack_rows(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As the twin's, in one launch."""
        num_rows, width = packed.shape[0], packed.shape[1] - SCALE_BYTES
        out = packed.new_empty(num_rows, width, dtype=torch.float32)
        if out.numel():
            words = _words(packed)
            self._launch(
                "rows.unpack_rows",
                _programs(num_rows, width, _UNPACK_TILE[0], 4 * _UNPACK_TILE[1]),
                (words, out),
                (num_rows, width // 4, words.stride(0)),
                (*_UNPACK_TILE, dtype == torch.float8_e5m2, self._interpreted),
                _TILE_WARPS,
            )
        return out

    def dequantize(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As the twin's, in one launch."""
        data, num_rows, width, pitch, unit, _ = _source(data)
        out = data.new_empty(num_rows, width, dtype=dtype)
        if out.numel():
            self._launch(
                "tiles.dequantize_tiles",
                _programs(num_rows, width, _AMAX_ROWS, _AMAX_COLUMNS),
                (data, scale.contiguous(), out),
                (num_rows, width // unit, pitch // unit, 0 if scale.numel() == 1 else 1),
                (unit, _AMAX_ROWS, _AMAX_COLUMNS, data.dtype == torch.float8_e5m2, self._interpreted),
                _TILE_WARPS,
            )
        return out

    def _launch(
        self,
        name: str,
        programs: int,
        tensors: Sequence[torch.Tensor],
        numbers: tuple[int | float, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        kind: Hashable = None,
    ) -> None:
        """Any launch. ``kind``: under which those that follow, all pointers aligned, find the binary in `_ready`."""

        def slowly() -> Any:
            return load(name)[(programs,)](*_seen(name, tensors), *numbers, *constants, num_warps=num_warps)

        if self._kernels is None:
            slowly()
            return
        if self._index != current_device():
            with torch.cuda.device(self._index):
                self._launch(name, programs, tensors, numbers, constants, num_warps, kind)
            return
        if max(numbers) >= _MOST:
            raise ActiveShapeError(f"FP8 kernels take fewer than 2**31 rows and columns, got {numbers}")
        addresses = [tensor.data_ptr() for tensor in tensors]
        # A binary depends on which pointers are aligned: nearly always all of them.
        aligned = reduce(or_, addresses) % _VECTOR == 0 or tuple([address % _VECTOR == 0 for address in addresses])
        # Of the dtypes, only the first and the last tensor's are not the kernel's own.
        variant = (name, constants, num_warps, tensors[0].dtype, tensors[-1].dtype, aligned)
        self._kernels.launch(variant, programs, [*addresses, *numbers], constants, slowly)
        if kind is not None and aligned is True:
            self._ready[kind] = self._kernels.found(variant)


def load(name: str) -> Any:
    """Triton's function ``module.function`` of this package."""
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"tpoverlap.gemm.fp8.kernels.{module}"), function)


def _seen(name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    kinds = _SEEN_AS.get(name) or (None,) * len(tensors)
    return [
        tensor if kind is None or tensor.dtype == torch.int32 else tensor.view(kind)
        for tensor, kind in zip(tensors, kinds, strict=True)
    ]


def _source(x: torch.Tensor) -> _Source:
    """``x`` [rows, columns] as kernels read it: a copy only if its rows are not contiguous.

    Rows of one element may have any pitch.

    Raises:
        ActiveShapeError: a kernel's 32-bit numbers do not hold a size.
    """
    num_rows, width = x.shape
    pitch, step = x.stride()
    if step != 1 and width != 1:
        x = x.contiguous()
        pitch = x.stride(0)
    address = x.data_ptr()
    # Whole vectors that start on 16 bytes, in every row.
    unit = _VECTOR if (width | pitch | address) % _VECTOR == 0 else 1
    if num_rows >= _MOST or width // unit >= _MOST or pitch // unit >= _MOST:
        raise ActiveShapeError(
            f"FP8 kernels take fewer than 2**31 rows and columns, got {list(x.shape)}, rows {pitch} elements apart"
        )
    return x, num_rows, width, pitch, unit, address


def _words(packed: torch.Tensor) -> torch.Tensor:
    """Packed rows as int32."""
    assert packed.stride(1) == 1 and packed.data_ptr() % 4 == 0 and packed.stride(0) % 4 == 0, "not rows of words"
    return packed.view(torch.int32)


def _programs(num_rows: int, width: int, tile_rows: int, tile_columns: int) -> int:
    return min(-(-num_rows // tile_rows) * -(-width // tile_columns), _PROGRAMS)
