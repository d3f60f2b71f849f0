"""Launching the FP8 kernels: the same operations as `tpoverlap.gemm.fp8.plain.PlainOperations`, on a GPU.

A variant names all that a binary depends on (constants, dtype, which pointers are aligned; sizes are never
specialised), so a launch is one look-up (`tpoverlap.gemm.triton.direct`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, Final

import torch

from tpoverlap.errors import ActiveShapeError, BackendUnavailableError
from tpoverlap.gemm.fp8.plain import MOST_MAXIMA, SCALE_BYTES, padded
from tpoverlap.gemm.fp8.scale_rule import ScaleRule
from tpoverlap.gemm.triton import kernels_missing
from tpoverlap.gemm.triton.direct import DirectKernels, current_device
from tpoverlap.gemm.triton.kernel_driver import CudaKernelDriver

_VECTOR: Final = 16
_TILE: Final = (128, 128)
_AMAX_TILE: Final = (8, 1024)
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
        if not self._interpreted:
            self._index = torch.cuda.current_device() if device.index is None else device.index
            self._kernels = DirectKernels(CudaKernelDriver(torch.device("cuda", self._index)))

    def maxima(self, x: torch.Tensor, *, shared: bool = False) -> torch.Tensor:
        """As the twin's; n is the number of programs, and those without a tile find 0."""
        x = _in_rows(x)
        num_rows, width = x.shape
        rows, columns = _AMAX_TILE
        if x.is_contiguous() and x.numel() % columns == 0:
            num_rows, width, pitch = x.numel() // columns, columns, columns
        else:
            pitch = x.stride(0)
        tiles = -(-num_rows // rows) * -(-width // columns)
        if tiles == 0:
            return x.new_zeros(MOST_MAXIMA if shared else 1, 1, dtype=torch.float32)
        found = x.new_empty(MOST_MAXIMA if shared else min(tiles, MOST_MAXIMA), 1, dtype=torch.float32)
        unit = _unit(x, width, pitch)
        self._launch(
            "tiles.amax_tiles",
            found.shape[0],
            (x, found),
            (num_rows, width // unit, pitch // unit),
            (unit, rows, columns),
            _TILE_WARPS,
        )
        return found

    def quantize_by_maxima(
        self, x: torch.Tensor, maxima: torch.Tensor, rule: ScaleRule, transposes: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """As the twin's, in one launch."""
        scale = maxima.new_empty(1, 1)
        return *self._quantize(x, maxima, scale, rule, transposes), scale

    def quantize(
        self, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, transposes: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the twin's, in one launch."""
        return self._quantize(x, None, scale, ScaleRule(dtype), transposes)

    def _quantize(
        self, x: torch.Tensor, maxima: torch.Tensor | None, scale: torch.Tensor, rule: ScaleRule, transposes: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = _in_rows(x)
        num_rows, width = x.shape
        data = x.new_empty(num_rows, width, dtype=rule.dtype)
        transposed = x.new_empty(width, padded(num_rows), dtype=rule.dtype) if transposes else None
        unit = _unit(x, width, x.stride(0))
        words = transposed if num_rows else None
        self._launch(
            "tiles.quantize_tiles",
            _programs(num_rows, width),
            (
                x,
                scale if maxima is None else maxima,
                scale,
                data,
                scale if words is None else words,
            ),
            (
                0 if maxima is None else maxima.numel(),
                num_rows,
                width // unit,
                x.stride(0) // unit,
                padded(num_rows) // _VECTOR,
                rule.factor,
                rule.epsilon,
            ),
            (
                unit,
                *_TILE,
                0 if maxima is None else MOST_MAXIMA,
                rule.is_e5m2,
                rule.power_of_2,
                words is not None,
                self._interpreted,
            ),
            _TILE_WARPS,
        )
        return data, transposed

    def transpose(self, data: torch.Tensor) -> torch.Tensor:
        """As the twin's, in one launch."""
        data = _in_rows(data)
        num_rows, width = data.shape
        made = data.new_empty(width, padded(num_rows))
        if made.numel():
            unit = _unit(data, width, data.stride(0))
            self._launch(
                "tiles.transpose_tiles",
                _programs(num_rows, width),
                (data, made),
                (num_rows, width // unit, data.stride(0) // unit, made.shape[1] // _VECTOR),
                (unit, *_TILE),
                _TILE_WARPS,
            )
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
        x = _in_rows(x)
        num_rows, width = x.shape
        if num_rows == 0:
            return
        columns = min(max(4, 1 << (width - 1).bit_length()), _ROW_BLOCK)
        rows = max(1, 4096 // columns)
        unit = _unit(x, width, x.stride(0))
        rule = ScaleRule(dtype)
        self._launch(
            "rows.quantize_rows",
            -(-num_rows // rows),
            (x, scale, data),
            (num_rows, width // unit, x.stride(0) // unit, data.stride(0), rule.factor),
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
                _programs(num_rows, width, (_UNPACK_TILE[0], 4 * _UNPACK_TILE[1])),
                (words, out),
                (num_rows, width // 4, words.stride(0)),
                (*_UNPACK_TILE, dtype == torch.float8_e5m2, self._interpreted),
                _TILE_WARPS,
            )
        return out

    def dequantize(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As the twin's, in one launch."""
        is_e5m2, data = data.dtype == torch.float8_e5m2, _in_rows(data)
        num_rows, width = data.shape
        out = data.new_empty(num_rows, width, dtype=dtype)
        if out.numel():
            unit = _unit(data, width, data.stride(0))
            self._launch(
                "tiles.dequantize_tiles",
                _programs(num_rows, width, _AMAX_TILE),
                (data, scale.contiguous(), out),
                (num_rows, width // unit, data.stride(0) // unit, 0 if scale.numel() == 1 else 1),
                (unit, *_AMAX_TILE, is_e5m2, self._interpreted),
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
    ) -> None:
        def slowly() -> Any:
            return load(name)[(programs,)](*_seen(name, tensors), *numbers, *constants, num_warps=num_warps)

        if self._kernels is None:
            slowly()
            return
        if self._index != current_device():
            with torch.cuda.device(self._index):
                self._launch(name, programs, tensors, numbers, constants, num_warps)
            return
        if max(numbers) >= _MOST:
            raise ActiveShapeError(f"FP8 kernels take fewer than 2**31 rows and columns, got {numbers}")
        addresses = [tensor.data_ptr() for tensor in tensors]
        # A binary depends on which pointers are aligned: nearly always all of them.
        aligned = reduce(or_, addresses) % _VECTOR == 0 or tuple([address % _VECTOR == 0 for address in addresses])
        # Of the dtypes, only the first and the last tensor's are not the kernel's own.
        variant = (name, constants, num_warps, tensors[0].dtype, tensors[-1].dtype, aligned)
        self._kernels.launch(variant, programs, [*addresses, *numbers], constants, slowly)


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


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` [rows, columns] with contiguous rows; a copy only if not. Rows of one element may have any pitch."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _words(packed: torch.Tensor) -> torch.Tensor:
    """Packed rows as int32."""
    assert packed.stride(1) == 1 and packed.data_ptr() % 4 == 0 and packed.stride(0) % 4 == 0, "not rows of words"
    return packed.view(torch.int32)


def _unit(x: torch.Tensor, width: int, pitch: int) -> int:
    """16 where rows consist of whole vectors that start on 16 bytes, else 1."""
    return _VECTOR if width % _VECTOR == 0 and pitch % _VECTOR == 0 and x.data_ptr() % _VECTOR == 0 else 1


def _programs(num_rows: int, width: int, tile: tuple[int, int] = _TILE) -> int:
    """One at least: it writes the scale of a tensor without rows."""
    return max(1, min(-(-num_rows // tile[0]) * -(-width // tile[1]), _PROGRAMS))
