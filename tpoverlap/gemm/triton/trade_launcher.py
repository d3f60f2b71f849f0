"""Launching the kernels that exchange few rows: `trade_gather` and `trade_scatter`.

A launch is prepared once for a partition, a slot and a stream. Afterwards it is one store of what changes from
operation to operation, which the kernels take first, and one call of the driver.

On Hopper and later a kernel's programs are placed while the kernel ahead of them in the stream comes to its end
(programmatic dependent launch), and wait for that before they do anything: the exchange begins a microsecond earlier.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, Final

import torch

from tpoverlap.fused_form import SUMMING_PROGRAMS, TRADING_PROGRAMS
from tpoverlap.gemm.triton.compiled import CompiledKernels, Kernel, launch_slowly
from tpoverlap.gemm.triton.gates import TradeSlot
from tpoverlap.gemm.triton.kernel_driver import CudaKernelDriver, KernelDriver, LaunchConfig
from tpoverlap.gemm.triton.tiles import TileShape
from tpoverlap.gemm.triton.wait_bound import WaitBound
from tpoverlap.native import Recording

MOST_RANKS: Final = 8
"""The kernels take so many ranks' addresses."""
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
"""Of sums."""
_LEAST_PART_BYTES: Final = 8192
"""A program copies at least this much."""
_VECTOR_BYTES: Final = 16
_WARPS: Final = 8
_UNITS: Final = 4096
"""Of 4 bytes, in a gather's step: each thread has four vectors in flight."""
_SUMMED_BYTES: Final = 16384
"""Of a scatter's step: the same, of each summand; half of it where there are many, which are all held in registers."""
_MANY: Final = 4
_INTERPRETED_UNITS: Final = 1024
_LEAST_SUM_BYTES: Final = 4096
"""A program adds at least this much of own rows."""
_INTERPRETED_PROGRAMS: Final = 3
_MASK: Final = (1 << 64) - 1
_PROGRAMMATIC, _ATTRIBUTE_WORDS = 6, 18
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, and the size of a CUlaunchAttribute: its value is 1."""


def _by_rank(name: str) -> tuple[str, ...]:
    return tuple(f"{name}{rank}" for rank in range(MOST_RANKS))


TRADE_GATHER: Final = Kernel("trade_gather", (
    "source", "epoch", "record", "digest", "entry", "place", "count", "parts", "depth", "rows", "senders", "rank",
    "arrivals", "credits", "descriptors", "ring_bytes", "flags_bytes", "counters", "limit", "error",
    *_by_rank("data"), *_by_rank("flag"), *_by_rank("told"),
))  # fmt: skip
TRADE_SCATTER: Final = Kernel("trade_scatter", (
    "source", "out", "bias", "epoch", "record", "digest", "entry", "done", "number", "ends", "parts", "depth", "width",
    "rank", "received", "arrivals", "credits", "descriptors", "ring_bytes", "flags_bytes", "counters", "limit", "error",
    *_by_rank("count"), *_by_rank("data"), *_by_rank("flag"), *_by_rank("told"), *_by_rank("credit"),
))  # fmt: skip
CHANGING: Final = {TRADE_GATHER.name: 5, TRADE_SCATTER.name: 10}
"""How many of a kernel's first arguments each launch gives."""


class Trade:
    """A prepared launch: `start` takes the kernel's changing arguments, unsigned, of 64 bits each."""

    def start(self, *changing: int) -> None:
        """Launch it on the stream that it was prepared for."""
        raise NotImplementedError

    def record(self, recording: Recording, *changing: int) -> bool:
        """Write `start` down for a tape, with registers among the arguments. False: only Python launches it."""
        return False


class PackedTrade(Trade):
    """By one call of the driver."""

    def __init__(
        self,
        driver: KernelDriver,
        kernel: Kernel,
        binary: Any,
        fixed: Sequence[int],
        programs: int,
        stream: int,
        *,
        ahead: bool,
    ) -> None:
        count = len(kernel.arguments)
        self._driver, self._keeps = driver, binary
        self._start, self._function = driver.start, binary.function
        self._block = (ctypes.c_uint64 * (count + 2))()  # two pointers to scratch memory, which no kernel here has
        first = ctypes.addressof(self._block)
        self._pack = struct.Struct(f"<{CHANGING[kernel.name]}Q").pack_into
        struct.pack_into(f"<{len(fixed)}Q", self._block, 8 * CHANGING[kernel.name], *fixed)
        self._parameters = (ctypes.c_uint64 * (count + 2))(*range(first, first + 8 * (count + 2), 8))
        self._parameters_at = ctypes.addressof(self._parameters)
        metadata = binary.metadata
        threads = 32 * metadata.num_warps
        self._attribute = (ctypes.c_uint32 * _ATTRIBUTE_WORDS)(_PROGRAMMATIC, 0, 1)
        attributes = (ctypes.addressof(self._attribute), 1) if ahead else (0, 0)
        self._config = LaunchConfig((programs, 1, 1), (threads, 1, 1), metadata.shared, stream, *attributes)
        self._config_at = ctypes.addressof(self._config)

    def start(self, *changing: int) -> None:
        self._pack(self._block, 0, *changing)
        status = self._start(self._config_at, self._function, self._parameters_at, 0)
        if status:
            self._driver.start_again(status, self._config_at, self._function, self._parameters_at)

    def record(self, recording: Recording, *changing: int) -> bool:
        first = ctypes.addressof(self._block)
        recording.patch([(first + 8 * place, operand) for place, operand in enumerate(changing)])
        recording.start(self._config_at, self._function, self._parameters_at, self)
        return True


class SlowTrade(Trade):
    """By Triton: in the interpreter, and where only Triton knows how a binary takes its parameters."""

    def __init__(
        self, kernel: Kernel, constants: tuple[Any, ...], fixed: Sequence[int], programs: int, tile: TileShape
    ) -> None:
        self._kernel, self._constants, self._programs, self._tile = kernel, constants, programs, tile
        self._fixed = [_signed(value) for value in fixed]

    def start(self, *changing: int) -> None:
        arguments = [*map(_signed, changing), *self._fixed]
        launch_slowly(self._kernel, self._programs, arguments, self._constants, self._tile)


class TradeLauncher:
    """Prepares the launches of one manager. The caller has checked `require_kernels`.

    Args:
        device: of all memory.
        limit_s: bound of a kernel's waits.
        driver: instead of the device's (tests).

    Attributes:
        error: one word, not 0 once a kernel gave up a wait.
    """

    def __init__(self, device: torch.device, limit_s: float, driver: KernelDriver | None = None) -> None:
        if driver is None and device.type == "cuda":
            driver = CudaKernelDriver(device)
        self._device, self._driver = device, driver
        self._ahead = driver is not None and driver.has_tma  # both came with Hopper
        self._bound = WaitBound(device, limit_s, interpreted=driver is None)
        self._kernels = CompiledKernels(driver)
        self.error = self._bound.error
        self._counters: dict[int, torch.Tensor] = {}

    def gather(
        self, counts: tuple[int, ...], row_bytes: int, itemsize: int, slot: TradeSlot, aligned: bool, stream: int
    ) -> Trade:
        """For own rows that start at a multiple of 16 bytes if ``aligned``.

        Changing: address of own rows, epoch, record, digest, byte offset of the descriptor in its ring.

        Args:
            counts: rows of each rank. row_bytes, itemsize: bytes of a row and of its elements.
        """
        import triton.language as tl

        unit_bytes, multiple = min(itemsize, 4), 1
        if aligned and row_bytes % _VECTOR_BYTES == 0:
            unit_bytes, multiple = 4, _VECTOR_BYTES // 4
        group_bytes, rank = unit_bytes * multiple, slot.rank
        own, before, total = counts[rank], sum(counts[:rank]), sum(counts)
        parts = max(1, min(TRADING_PROGRAMS, own * row_bytes // _LEAST_PART_BYTES))
        if self._driver is None:  # small rows, still cut into parts
            parts = _INTERPRETED_PROGRAMS
        groups_a_row = row_bytes // group_bytes
        fixed = (
            before * groups_a_row, own * groups_a_row, parts, slot.depth, total * groups_a_row,
            sum(1 << source for source, count in enumerate(counts) if count), rank, slot.arrivals, slot.credits,
            slot.descriptors, slot.ring_bytes, slot.flags_bytes, self._counters_of(stream), self._bound.limit,
            self._bound.address, *_padded(slot.data), *_padded(slot.flags), *_padded(slot.told),
        )  # fmt: skip
        unit = {1: tl.int8, 2: tl.int16, 4: tl.int32}[unit_bytes]
        units = _INTERPRETED_UNITS if self._driver is None else _UNITS
        constants = (len(counts), unit, multiple, units, self._driver is None, self._ahead)
        return self._prepare(TRADE_GATHER, constants, fixed, parts, stream)

    def scatter(
        self,
        counts: tuple[int, ...],
        width: int,
        dtype: torch.dtype,
        slot: TradeSlot,
        aligned: bool,
        has_bias: bool,
        stream: int,
    ) -> Trade:
        """For partial sums and results that start at multiples of 16 bytes if ``aligned``.

        Changing: addresses of the partial sums, the result and the bias (0: none); epoch, record, digest, byte offset
        of the descriptor in its ring; address and value of the host's word; 1 to give credits and write that word.

        Args:
            counts: rows of each rank. width: elements of a row, of type ``dtype`` (of `DTYPES`).
        """
        import triton.language as tl

        row_bytes, rank = width * dtype.itemsize, slot.rank
        multiple = 1
        if aligned and row_bytes % _VECTOR_BYTES == 0:
            multiple = _VECTOR_BYTES // dtype.itemsize
        groups_a_row, peers = width // multiple, len(counts) - 1
        own, most = counts[rank], max(counts)
        parts = max(1, min(TRADING_PROGRAMS // peers, most * row_bytes // _LEAST_PART_BYTES))
        # One program more than parts: it has nothing to send, and publishes.
        programs = max(parts * peers + 1, min(SUMMING_PROGRAMS, own * row_bytes // _LEAST_SUM_BYTES))
        if self._driver is None:
            parts = programs = _INTERPRETED_PROGRAMS
        assert 4 * (parts + 2) <= slot.flags_bytes, "each part has a flag, and so have the whole and what is computed"
        blocks = [
            data + (rank if rank < owner else rank - 1) * count * row_bytes
            for owner, (data, count) in enumerate(zip(slot.data, counts, strict=True))
        ]
        fixed = (
            parts, slot.depth, width, rank, slot.data[rank], slot.arrivals, slot.credits, slot.descriptors,
            slot.ring_bytes, slot.flags_bytes, self._counters_of(stream), self._bound.limit, self._bound.address,
            *_padded([count * groups_a_row for count in counts]), *_padded(blocks), *_padded(slot.flags),
            *_padded(slot.told), *_padded(slot.grants),
        )  # fmt: skip
        element = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]
        units = _INTERPRETED_UNITS if self._driver is None else summed_units(len(counts), dtype.itemsize)
        constants = (len(counts), element, multiple, units, has_bias, self._driver is None, self._ahead)
        return self._prepare(TRADE_SCATTER, constants, fixed, programs, stream)

    def _prepare(
        self, kernel: Kernel, constants: tuple[Any, ...], fixed: Sequence[int], programs: int, stream: int
    ) -> Trade:
        """Compiled and loaded before anybody waits, by a launch that has nothing to do."""
        tile = TileShape(0, 0, 0, 1, _WARPS)
        driver = self._driver
        if driver is None:
            return SlowTrade(kernel, constants, fixed, programs, tile)
        nothing = [0] * len(kernel.arguments)
        nothing[kernel.arguments.index("counters")] = self._counters_of(stream)
        self._kernels.load(kernel, constants, lambda: tuple(nothing), constants, tile)
        binary, layout = self._kernels.binary(kernel, constants)
        if layout is None or set(layout.places.values()) != {(8 * n, "q") for n in range(len(nothing))}:
            return SlowTrade(kernel, constants, fixed, programs, tile)
        return PackedTrade(driver, kernel, binary, fixed, programs, stream, ahead=self._ahead)

    def _counters_of(self, stream: int) -> int:
        """Address of the counters of the launches on a stream, which follow one another."""
        if stream not in self._counters:
            self._counters[stream] = torch.zeros(4, dtype=torch.int32, device=self._device)
        return self._counters[stream].data_ptr()


def summed_units(num_ranks: int, itemsize: int) -> int:
    """Elements that a program adds at a time."""
    return _SUMMED_BYTES // itemsize // (2 if num_ranks > _MANY else 1)


def _padded(values: Sequence[int]) -> tuple[int, ...]:
    return (*values, *[0] * (MOST_RANKS - len(values)))


def _signed(value: int) -> int:
    return ((value + (1 << 63)) & _MASK) - (1 << 63)
