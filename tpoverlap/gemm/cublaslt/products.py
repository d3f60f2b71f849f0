"""Matrix products by cublasLt itself: less of the processor's time than through torch, and a sum with no copy first.

``torch.addmm(addend, left, right, out=out)`` copies the addend into ``out`` and adds to that; the library can read it
where it is. ``torch._scaled_mm`` cannot add at all, and asks the library for an algorithm in every call.

What products have in common that differ only in addresses and in their number of rows is a `Family`
(`tpoverlap.gemm.cublaslt.family`).
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from threading import Lock
from typing import Any, Final
from weakref import WeakValueDictionary

import torch

from tpoverlap.errors import BackendUnavailableError
from tpoverlap.gemm.cublaslt.family import ALIGNMENT_BYTES, Family
from tpoverlap.gemm.cublaslt.library import (
    A_SCALE_POINTER,
    B_SCALE_POINTER,
    BIAS_POINTER,
    WORKSPACE_BYTES,
    CublasLt,
    Library,
    NativeLibrary,
)
from tpoverlap.gemm.triton.direct import current_device
from tpoverlap.native import Recording

logger = logging.getLogger("tpoverlap")
_WIDE: Final = (torch.bfloat16, torch.float16)
_MOST_FAMILIES: Final = 256
_MOST_STREAMS: Final = 8


class _Workspace:
    """Of one stream: products on it follow one another, so they may share it."""

    __slots__ = ("__weakref__", "address", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.address = memory, memory.data_ptr()


class LtProducts:
    """Products of one device; autograd's threads may ask at the same time as others.

    Args:
        library: of the device.
        index: the device's.
    """

    def __init__(self, library: Library, index: int) -> None:
        self._library, self._index = library, index
        self._families: dict[tuple[Any, ...], Family] = {}
        self._workspaces: dict[int, _Workspace] = {}
        self._held: WeakValueDictionary[int, _Workspace] = WeakValueDictionary()  # by tapes, too
        self._lock = Lock()
        self._factors = (ctypes.c_float * 2)(1.0, 0.0)
        one = ctypes.addressof(self._factors)
        self._overwrite, self._add = (one, one + 4), (one, one)
        self._current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)

    def multiply(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        out: torch.Tensor,
        addend: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        fast: bool = False,
    ) -> bool:
        """``out[:] = (left @ right) * scales + addend + bias``, summed in float32, rounded once, on the current stream.

        Args:
            left: [M, K] of dense rows, M at least 1.
            right: [K, N], rows or columns dense.
            out: [M, N] of dense rows, no part of an operand. addend: like it, and may be it.
            bias: [N], contiguous, in the dtype of ``out``; from 16 bytes on, too.
            scales: of FP8 operands, left and right: float32, one element each.
            fast: FP8 tensor cores may keep sums in less than float32.

        Returns:
            False, and nothing has happened, where torch has to do it: another dtype or layout, something not aligned
            to 16 bytes, nothing the library has an algorithm for, or no memory for its workspace.
        """
        key = _family_key(left, right, out, addend, bias, fast=fast)
        family = self._families.get(key)
        addresses = (
            right.data_ptr(), left.data_ptr(), out.data_ptr() if addend is None else addend.data_ptr(), out.data_ptr()
        )  # fmt: skip
        bias_address = 0 if bias is None else bias.data_ptr()
        if (addresses[0] | addresses[1] | addresses[2] | addresses[3] | bias_address) % ALIGNMENT_BYTES:
            return False
        if left.is_cuda and self._index != current_device():  # the library launches on the current one
            with torch.cuda.device(self._index):
                return self.multiply(left, right, out, addend, bias, scales, fast=fast)
        if family is None:
            if not _takes(left, right, out, addend, bias, scales):
                return False
            with self._lock:
                family = self._new_family(key, left, right, out, addend, bias, fast=fast)
        stream = self._current_stream(self._index)
        with self._lock:
            workspace = self._workspaces.get(stream) or self._new_workspace(stream, left.device)
            if workspace is None:
                return False
            return family.run(
                left.shape[0],
                addresses,
                self._overwrite if addend is None else self._add,
                workspace.address,
                stream,
                bias_address,
                None if scales is None else (scales[1].data_ptr(), scales[0].data_ptr()),
            )

    def record(
        self,
        recording: Recording,
        stream: int,
        left: torch.Tensor,
        right: torch.Tensor,
        out: torch.Tensor,
        addend: torch.Tensor | None,
        bias: torch.Tensor | None,
        operands: tuple[int, int, int, int],
        bias_at: int = 0,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
        scales_at: tuple[int, int] = (0, 0),
        *,
        fast: bool = False,
    ) -> bool:
        """Write `multiply` down for a tape, on ``stream``. False, and nothing was written, where torch has to do it.

        Args:
            left, right, out, addend, bias, scales, fast: as for `multiply`: what each launch's tensors are like.
            operands, bias_at, scales_at: where they lie: of right, left, addend (out, without one) and out; of the
                bias; of the left and of the right operand's scale. Addresses or registers, multiples of 16 bytes but
                for the scales': the caller sees to that.
        """
        key = _family_key(left, right, out, addend, bias, fast=fast)
        with self._lock:
            family = self._families.get(key)
            if family is None:
                if not _takes(left, right, out, addend, bias, scales):
                    return False
                family = self._new_family(key, left, right, out, addend, bias, fast=fast)
            workspace = self._workspaces.get(stream) or self._new_workspace(stream, left.device)
            fixed = family.fixed(left.shape[0], points=bias is not None or scales is not None)
        if workspace is None or fixed is None:
            return False
        pointers = {} if bias is None else {BIAS_POINTER: bias_at}
        if scales is not None:
            pointers |= {A_SCALE_POINTER: scales_at[1], B_SCALE_POINTER: scales_at[0]}
        recording.keeps.append(workspace)
        factors = self._overwrite if addend is None else self._add
        fixed.record(recording, operands, factors, workspace.address, stream, pointers)
        return True

    def native(self) -> NativeLibrary:
        """`Library.native`."""
        return self._library.native()

    def _new_family(
        self,
        key: tuple[Any, ...],
        left: torch.Tensor,
        right: torch.Tensor,
        out: torch.Tensor,
        addend: torch.Tensor | None,
        bias: torch.Tensor | None,
        *,
        fast: bool,
    ) -> Family:
        if len(self._families) >= _MOST_FAMILIES:
            self._families.clear()  # descriptors are a few hundred bytes each, and stay with the process
        made = Family(self._library, left, right, out, addend, has_bias=bias is not None, fast=fast)
        self._families[key] = made
        return made

    def _new_workspace(self, stream: int, device: torch.device) -> _Workspace | None:
        """None: there is no memory for it. Said each time: torch, which does it then, may run out of it as well."""
        if len(self._workspaces) >= _MOST_STREAMS:
            self._workspaces.clear()  # torch hands the memory to what comes later on the same streams only
        held = self._held.get(stream)
        if held is not None:
            self._workspaces[stream] = held
            return held
        try:
            memory = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            logger.warning("%s: no %d bytes of workspace for cublasLt: torch multiplies", device, WORKSPACE_BYTES)
            return None
        found = self._workspaces[stream] = self._held[stream] = _Workspace(memory)
        return found


def _family_key(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    addend: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    fast: bool,
) -> tuple[Any, ...]:
    return (
        left.dtype, right.dtype, out.dtype, right.shape, left.stride(), right.stride(), out.stride(),
        None if addend is None else addend is out or (addend.dtype, addend.stride()),
        None if bias is None else bias.dtype, fast,
    )  # fmt: skip


def _takes(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    addend: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> bool:
    """What a whole family has in common."""
    itemsize, inner = left.dtype.itemsize, right.shape[0]
    if scales is None:
        known = left.dtype in _WIDE and left.dtype == right.dtype == out.dtype
        dense_right = 1 in right.stride()
    else:
        known = left.dtype.itemsize == right.dtype.itemsize == 1 and out.dtype in (*_WIDE, torch.float32)
        dense_right = right.stride(0) == 1  # tensor cores read both along K
    rows = (left, out) if addend is None else (left, out, addend)
    if not known or not dense_right or inner < 2 or any(one.stride(1) != 1 for one in rows):
        return False
    if bias is not None and bias.dtype != out.dtype:  # torch says what is wrong with it
        return False
    if bias is not None and scales is not None and out.dtype == torch.float32:  # the library has no such epilogue
        return False
    # Rows that overlap: a sum's gradient is one row, seen many times.
    if any(one.stride(0) < one.shape[1] for one in rows) or max(right.stride()) < right.shape[right.stride(0) != 1]:
        return False
    leading = max(right.stride()) * itemsize
    return (leading | left.stride(0) * itemsize | out.stride(0) * out.dtype.itemsize) % ALIGNMENT_BYTES == 0 and (
        addend is None or (addend.dtype == out.dtype and addend.stride(0) * out.dtype.itemsize % ALIGNMENT_BYTES == 0)
    )


def _raw_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


@lru_cache(maxsize=16)
def lt_products(index: int) -> LtProducts | None:
    """Those of a CUDA device; None, said once in the log, where the library is not to be had."""
    try:
        with torch.cuda.device(index):
            return LtProducts(CublasLt(), index)
    except BackendUnavailableError as error:
        logger.warning("cuda:%d: GEMMs go through torch, and copy what they add to: %s", index, error)
        return None
